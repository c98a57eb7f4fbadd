"""Optimizers that keep their state in ways of their own, run by whoever brings a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import Setting, assert_close, finishes, gradient, run, start
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.optim.parameterwise import ParameterWise
from tutti.strategies import Downpour

LR, MU = 0.05, 0.9


class Rebinding(ParameterWise):
    """Momentum, whose velocity is a new tensor in each step."""

    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        state["velocity"] = MU * state.get("velocity", torch.zeros_like(gradient)) + gradient
        weights.sub_(state["velocity"], alpha=group["lr"])


class Counting(ParameterWise):
    """Counts its steps by a number, which processes cannot share."""

    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[weights]["count"] = self.state[weights].get("count", 0) + 1


class Foreign(optim.SGD):
    """May keep anything anywhere."""


Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def by_hand(kind: type[ParameterWise], steps: int) -> Tensor:
    """One optimizer for all workers' gradients, each of which is computed at what its worker pulled."""
    parameter = nn.Parameter(start())
    optimizer = kind([parameter], {"lr": LR})
    pulled = {rank: start() for rank in range(3)}
    for rank, step in finishes(steps):
        parameter.grad = gradient(pulled[rank], rank, step)
        optimizer.step()
        pulled[rank] = parameter.detach().clone()
    return parameter.detach()


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_all_workers_share_the_state_of_an_optimizer(servers: int) -> None:
    setting = Setting(Downpour(), lambda module: Rebinding(module.parameters(), {"lr": LR}))
    assert_close(run(setting, VirtualWorld(3, servers=servers))[0].final, by_hand(Rebinding, 12))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda parameters: Counting(parameters, {"lr": LR}), "'count'"),
        (lambda parameters: Foreign(parameters, lr=LR), "side worker"),
        (optim.LBFGS, "LBFGS"),
        (optim.SparseAdam, "SparseAdam"),
    ],
)
def test_state_that_workers_cannot_share_is_refused(make: Make, word: str) -> None:
    with pytest.raises(BadOption, match=word):
        run(Setting(Downpour(), lambda module: make(module.parameters())))
