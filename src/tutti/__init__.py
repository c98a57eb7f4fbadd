"""Train a neural network on every core, GPU and machine you have.

The names below are loaded at their first use: `import tutti` alone imports neither torch nor MPI.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING


def _is_command() -> bool:
    """Tell whether the command `tutti`, or `python -m tutti`, begins here: nothing of it is there yet."""
    return sys.argv[0].rpartition("/")[2] == "tutti" or (sys.argv[0] == "-m" and "tutti" in sys.orig_argv)


if sys.platform != "linux":
    _system = "macOS" if sys.platform == "darwin" else sys.platform
    _refusal = (
        f"tutti runs on Linux, and this is {_system}: its ranks share memory and see each other end by "
        "system calls that only Linux has; use it in a Linux container or virtual machine, on Windows in WSL "
        "2 (docs/where-it-runs.md)"
    )
    if not _is_command():
        raise ImportError(_refusal)
    print(f"tutti: error: {_refusal}", file=sys.stderr)
    sys.exit(2)

try:
    from tutti.torch_backend.registration import register_with_torch
except KeyboardInterrupt:
    if not _is_command():
        raise
    print("tutti: interrupted", file=sys.stderr)
    sys.exit(130)

if TYPE_CHECKING:
    from tutti.comm.base import Communicator
    from tutti.errors import (
        BadData,
        BadModel,
        BadOption,
        BadRunFolder,
        NotFinite,
        PeerLost,
        RankFailed,
        TuttiError,
        UnknownName,
        UserError,
    )
    from tutti.own_loop.distribute import (
        checkpoints,
        distribute,
        finish,
        init,
        mean,
        settled,
        shard,
        total,
    )
    from tutti.records.run import EpochRecord, Evaluation, Summary
    from tutti.run.api import Result, train
    from tutti.run.config import TrainConfig
    from tutti.run.resize import resize
    from tutti.run.trained import TrainedModel, load
    from tutti.strategies import (
        ADPSGD,
        EASGD,
        GEM,
        Clip,
        DiLoCo,
        Downpour,
        EASGDSync,
        Gossip,
        Hogwild,
        Lazy,
        Local,
        ParamServer,
        Solo,
        Strategy,
        Sync,
        Worker,
    )
    from tutti.studies.cross_validation.api import CrossValidated, cross_validate
    from tutti.studies.ensemble.module import load_ensemble
    from tutti.studies.search.api import Found, tune
    from tutti.training.callbacks import Callback, Course

    __version__: str

__all__ = [
    "ADPSGD",
    "EASGD",
    "GEM",
    "BadData",
    "BadModel",
    "BadOption",
    "BadRunFolder",
    "Callback",
    "Clip",
    "Communicator",
    "Course",
    "CrossValidated",
    "DiLoCo",
    "Downpour",
    "EASGDSync",
    "EpochRecord",
    "Evaluation",
    "Found",
    "Gossip",
    "Hogwild",
    "Lazy",
    "Local",
    "NotFinite",
    "ParamServer",
    "PeerLost",
    "RankFailed",
    "Result",
    "Solo",
    "Strategy",
    "Summary",
    "Sync",
    "TrainConfig",
    "TrainedModel",
    "TuttiError",
    "UnknownName",
    "UserError",
    "Worker",
    "__version__",
    "checkpoints",
    "cross_validate",
    "distribute",
    "finish",
    "init",
    "load",
    "load_ensemble",
    "mean",
    "resize",
    "settled",
    "shard",
    "total",
    "train",
    "tune",
]


def _rendezvous_file(timeout_s: float) -> int | None:
    from tutti.launch.rendezvous import rendezvous_file  # A quarter of the time that `import tutti` takes.

    return rendezvous_file(timeout_s)


# What `torch.distributed.init_process_group("tutti")` needs.
register_with_torch(_rendezvous_file)


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Looking it up takes longer than all else here.
        from tutti.records.run import version

        return version("tutti")
    if name in __all__:
        value: object = getattr(import_module(_homes()[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tutti' has no attribute '{name}'")


def _homes() -> dict[str, str]:
    """Modules of the public names: the imports for type checkers say them, which are read as text."""
    import ast

    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
