"""Models that ranks import: a module of tests has imports that take seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(outputs))


def net(shape: tuple[int, ...], outputs: int, width: int = 1) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, width), nn.ReLU(), nn.Linear(width, outputs))


class FailsOn(nn.Module):
    """A model that fails on the fold whose folder ends with `fold`."""

    def __init__(self, shape: tuple[int, ...], outputs: int, fold: str) -> None:
        super().__init__()
        self.flat, self.last = nn.Flatten(), nn.Linear(64, outputs)
        # What a job prints goes into its folder.
        where = Path("/proc/self/fd/1").resolve()
        if where.parent.name == fold:
            raise ArithmeticError("no model for this fold")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.flat(x))
