"""Models that do what a job must not do, and data that say when they are read."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from tutti.records.files import refusing

calls: list[str] = []
"""Those of this module's functions that note them."""


def _model(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), outputs))


def raising(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Raise an exception."""
    raise ArithmeticError("no model today")


def raising_on_rank_1(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Raise an exception on one of two ranks."""
    if os.environ.get("RANK") == "1" or _rank() == 1:
        raise ArithmeticError("no model here")
    return _model(shape, outputs)


def _rank() -> int:
    from tutti.launch.launcher import started_by

    return started_by().rank


def starving(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Ask for more memory than there is."""
    torch.empty(1 << 60)
    return _model(shape, outputs)


def filling(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Find no room on the disk of the run folder."""
    with refusing(Path("folder")):
        raise OSError(errno.ENOSPC, "No space left on device")


def dying(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return _model(shape, outputs)


def leaving(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Exit without a word."""
    os._exit(0)


def hanging(shape: tuple[int, ...], outputs: int, note: str) -> nn.Module:
    """Note that it hangs, and never return, whoever asks for it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(note).touch()
    while True:
        time.sleep(60)


def careless(shape: tuple[int, ...], outputs: int, folder: str) -> nn.Module:
    """Set what is global, after writing down what was found there."""
    found = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        os.environ.get("CARELESS"),
        os.getcwd(),
        "careless" in sys.path,
        torch.rand(1).item(),
        torch.nn.init.zeros_.__name__,
        len(torch.nn.modules.module._global_forward_hooks),
        calls,
    )
    path = Path(folder, "found")
    path.write_text((path.read_text() if path.exists() else "") + f"{found}\n")
    print("printed by the model")
    os.system("echo printed by a child of the model >&2")
    warnings.warn("a warning of the model", stacklevel=1)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    torch.nn.init.zeros_ = torch.nn.init.ones_
    torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    calls.append("careless")
    os.environ["CARELESS"] = "yes"
    sys.path.append("careless")
    model = _model(shape, outputs)
    torch.manual_seed(0)
    os.chdir("/")
    return model


def counted(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Note that the data are read, and return some that depend on the seed."""
    with Path(folder, "reads").open("a") as file:
        file.write("read\n")
    return torch.rand(64, 4), torch.arange(64) % 2
