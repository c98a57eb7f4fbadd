"""The ways in which the ranks of a team hold one model together: one file each. They need no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tutti.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.layout import Layout
    from tutti.model_parallel.memory import MemoryNeed


@dataclass(frozen=True)
class Way(ABC):
    """A way to hold one model on several ranks. The fields of a subclass are the options of `--parallel`."""

    @abstractmethod
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        """Make this rank's portion of a model (collective): see `tutti.model_parallel.base.portion_of`."""

    @abstractmethod
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        """The need of the rank that needs the most: see `tutti.model_parallel.memory.needs`."""


WAYS: Final[Registry[type[Way]]] = Registry("tutti.model_parallel.ways", "way")
"""The ways by name."""
