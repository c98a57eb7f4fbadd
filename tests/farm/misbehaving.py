"""Models that do what a job must not do, and data that say when they are read."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


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


def counted(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Note that the data are read, and return some that depend on the seed."""
    with Path(folder, "reads").open("a") as file:
        file.write("read\n")
    return torch.rand(64, 4), torch.arange(64) % 2
