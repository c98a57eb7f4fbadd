"""Train a neural network on every core, GPU and machine you have.

The names below are loaded at their first use: `import tutti` alone imports neither torch nor MPI.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if sys.platform != "linux":
    raise ImportError(
        f"tutti runs on Linux, and this is {'macOS' if sys.platform == 'darwin' else sys.platform}: its "
        "ranks share memory and see each other end by system calls that only Linux has; use it in a Linux "
        "container or virtual machine, on Windows in WSL 2 (docs/where-it-runs.md)"
    )

from tutti.torch_backend.registration import register_with_torch

if TYPE_CHECKING:  # The public names; `as` says so to type checkers.
    from tutti.comm.base import Communicator as Communicator
    from tutti.errors import BadData as BadData
    from tutti.errors import BadModel as BadModel
    from tutti.errors import BadOption as BadOption
    from tutti.errors import BadRunFolder as BadRunFolder
    from tutti.errors import NotFinite as NotFinite
    from tutti.errors import PeerLost as PeerLost
    from tutti.errors import RankFailed as RankFailed
    from tutti.errors import TuttiError as TuttiError
    from tutti.errors import UnknownName as UnknownName
    from tutti.errors import UserError as UserError
    from tutti.own_loop.distribute import average_buffers as average_buffers
    from tutti.own_loop.distribute import checkpoints as checkpoints
    from tutti.own_loop.distribute import distribute as distribute
    from tutti.own_loop.distribute import init as init
    from tutti.own_loop.distribute import mean as mean
    from tutti.own_loop.distribute import shard as shard
    from tutti.own_loop.distribute import total as total
    from tutti.records.run import EpochRecord as EpochRecord
    from tutti.records.run import Evaluation as Evaluation
    from tutti.records.run import Summary as Summary
    from tutti.run.api import Result as Result
    from tutti.run.api import train as train
    from tutti.run.config import TrainConfig as TrainConfig
    from tutti.run.resize import resize as resize
    from tutti.run.trained import TrainedModel as TrainedModel
    from tutti.run.trained import load as load
    from tutti.strategies import ADPSGD as ADPSGD
    from tutti.strategies import EASGD as EASGD
    from tutti.strategies import GEM as GEM
    from tutti.strategies import AsyncDiLoCo as AsyncDiLoCo
    from tutti.strategies import Clip as Clip
    from tutti.strategies import DiLoCo as DiLoCo
    from tutti.strategies import Downpour as Downpour
    from tutti.strategies import EASGDSync as EASGDSync
    from tutti.strategies import Gossip as Gossip
    from tutti.strategies import Hogwild as Hogwild
    from tutti.strategies import Lazy as Lazy
    from tutti.strategies import Local as Local
    from tutti.strategies import NoLoCo as NoLoCo
    from tutti.strategies import ParamServer as ParamServer
    from tutti.strategies import Solo as Solo
    from tutti.strategies import SparseLoCo as SparseLoCo
    from tutti.strategies import Strategy as Strategy
    from tutti.strategies import Sync as Sync
    from tutti.strategies import Worker as Worker
    from tutti.studies.cross_validation.api import cross_validate as cross_validate
    from tutti.studies.cross_validation.result import CrossValidated as CrossValidated
    from tutti.studies.ensemble.module import load_ensemble as load_ensemble
    from tutti.studies.search.api import tune as tune
    from tutti.studies.search.study import Tuned as Tuned
    from tutti.studies.simulate.api import simulate as simulate
    from tutti.studies.simulate.result import Simulation as Simulation
    from tutti.training.callbacks import Callback as Callback
    from tutti.training.callbacks import Course as Course

    __version__: str

_IMPORT: Final = re.compile(r"^    from (\S+) import (\w+) as \w+$", re.MULTILINE)

_MODULES: Final = {name: module for module, name in _IMPORT.findall(Path(__file__).read_text("utf-8"))}
"""The modules of the public names, by the imports above."""

__all__ = sorted([*_MODULES, "__version__"])


def _rendezvous_file(timeout_s: float) -> int | None:
    from tutti.launch.rendezvous import rendezvous_file  # A quarter of the time that `import tutti` takes.

    return rendezvous_file(timeout_s)


# Needed by `torch.distributed.init_process_group("tutti")`.
register_with_torch(_rendezvous_file)


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Looking it up takes longer than everything else here.
        from tutti.records.run import version

        return version("tutti")
    if name not in _MODULES:
        raise AttributeError(f"module 'tutti' has no attribute '{name}'")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
