"""Data sets: their sources, their one copy in memory per host, and the samples of each rank.

Errors are `BadData` for data that are missing, broken, or do not fit together, `NotFinite` for NaN and inf,
and `BadOption` or `UnknownName` for an option that cannot be used.

The names below are loaded at their first use: `tutti.data.schemas` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tutti.data.batches import Batch as Batch
    from tutti.data.batches import Batches as Batches
    from tutti.data.batches import Queue as Queue
    from tutti.data.batches import Round as Round
    from tutti.data.builtin import BUILT_IN as BUILT_IN
    from tutti.data.opening import SamplePool as SamplePool
    from tutti.data.opening import open_data as open_data
    from tutti.data.opening import open_pool as open_pool
    from tutti.data.parts import DataSet as DataSet
    from tutti.data.parts import Part as Part
    from tutti.data.parts import Scale as Scale

_HOMES: Final = {
    "batches": "Batch Batches Queue Round",
    "builtin": "BUILT_IN",
    "opening": "SamplePool open_data open_pool",
    "parts": "DataSet Part Scale",
}
_MODULES: Final = {name: f"tutti.data.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tutti.data' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
