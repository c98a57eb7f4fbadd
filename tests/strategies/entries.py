"""What the ranks of the tests of `sync` run."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn, optim

from tests.strategies.sequential import Case, by_strategy
from tutti.comm.base import Communicator
from tutti.strategies import Clip, Sync


def mlp(dtype: torch.dtype) -> nn.Module:
    layers = nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 70), nn.ReLU(), nn.Linear(70, 5)
    return nn.Sequential(*layers).to(dtype)


def adamw(module: nn.Module) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def momentum(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


CASES = {
    "momentum": Case(partial(mlp, torch.float64), momentum, 20, dtype=torch.float64),
    "adamw": Case(partial(mlp, torch.float64), adamw, 20, dtype=torch.float64),
    "adamw-fp32": Case(partial(mlp, torch.float32), adamw, 20),
    "clipped": Case(partial(mlp, torch.float64), momentum, 20, Clip(norm=0.05), dtype=torch.float64),
}


def follow(comm: Communicator) -> dict[str, tuple[Tensor, Tensor]]:
    """By case: the weights after two runs."""
    return {
        name: (by_strategy(comm, case, Sync()), by_strategy(comm, case, Sync()))
        for name, case in CASES.items()
    }
