"""Losses that are sums over samples, beside losses that are means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.own_loop.jobs import differences
from tests.own_loop.loops.base import fit, net, samples, sgd, weights
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.loop import is_sum
from tutti.own_loop.stepper import OwnLoop

OWN = 5
LABELS = torch.arange(OWN) % 3
LOSSES: dict[str, tuple[bool, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "mean": (False, lambda out, goal, weight: (out - goal).square().mean()),
    "scaled mean": (False, lambda out, goal, weight: F.cross_entropy(out, LABELS) * torch.tensor(65536.0)),
    "weighted means": (False, lambda out, goal, weight: 0.3 * F.l1_loss(out, goal) - 0.7 * out[:, 0].mean()),
    "mean of sums": (False, lambda out, goal, weight: (out - goal).square().sum(1).mean()),
    "sum of means": (False, lambda out, goal, weight: out.mean(0).sum()),
    "mean of means": (False, lambda out, goal, weight: torch.stack([out.mean(), out.exp().mean()]).mean()),
    "pairs": (False, lambda out, goal, weight: F.cross_entropy(out @ out.T, torch.arange(OWN))),
    "decay": (False, lambda out, goal, weight: out.mean() + 0.1 * weight.square().sum() + weight.norm()),
    "sum": (True, lambda out, goal, weight: (out - goal).square().sum()),
    "sum of each dimension": (True, lambda out, goal, weight: (out - goal).square().sum(1).sum()),
    "sum over means": (True, lambda out, goal, weight: (out - goal).square().mean(-1).sum((0,))),
    "sum of all elements": (True, lambda out, goal, weight: out.exp().flatten().sum()),
    "sum beside a mean": (True, lambda out, goal, weight: out.mean() - out.exp().sum()),
    "cross entropy": (True, lambda out, goal, weight: F.cross_entropy(out, LABELS, reduction="sum")),
    "sum by samples": (False, lambda out, goal, weight: -0.5 * out.exp().sum() / len(out)),
    "sum times a part": (False, lambda out, goal, weight: out.exp().sum() * (1 / out.numel())),
    "by weights": (False, lambda out, goal, weight: (out.exp() * goal).sum() / goal.sum()),
    "norm": (False, lambda out, goal, weight: torch.norm(out - goal) ** 2),
    "einsum": (False, lambda out, goal, weight: torch.einsum("ij,ij->", out, goal)),
    "mean over dimensions": (False, lambda out, goal, weight: out.exp().sum(0).mean()),
    "Python's sum": (False, lambda out, goal, weight: cast("Tensor", sum(map(F.mse_loss, out, goal)))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_over_samples_is_told_from_a_mean(name: str) -> None:
    wanted, loss = LOSSES[name]
    out, weight = nn.Linear(4, 3)(torch.ones(OWN, 4)), nn.Parameter(torch.ones(OWN, 2))
    assert is_sum(loss(out, torch.rand(OWN, 3), weight).grad_fn, OWN) is wanted


@pytest.mark.parametrize("reduction", ["sum", "mean", None])
def test_a_sum_is_refused_unless_distribute_is_told(worlds: Worlds, reduction: str | None) -> None:
    def work(comm: Communicator) -> str:
        distribute._loop = OwnLoop(comm)
        model = net()
        distribute.distribute(model, sgd(model), reduction=reduction)
        inputs, targets = next(iter(distribute.shard(DataLoader(samples(8), 8))))
        fit(model, inputs, targets).backward()
        try:
            F.cross_entropy(model(inputs), targets, reduction="sum").backward()
        except BadOption as error:
            return str(error)
        return ""

    for told in worlds.call(work, 2):
        assert ("reduction='sum'" in told) is (reduction is None)


def _search(comm: Communicator | None, count: int, averaged: bool = False) -> list[dict[str, Tensor]]:
    """A line search by the loss of all batches of 4."""
    model = net()
    optimizer: Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    loader: Iterable[list[Tensor]] = DataLoader(samples(count), 4)
    if comm is not None:
        distribute._loop = OwnLoop(comm)
        distribute.distribute(model, optimizer)
        loader = distribute.shard(loader)

    def closure() -> float:
        optimizer.zero_grad()
        whole = 0.0
        for inputs, targets in loader:
            loss = fit(model, inputs, targets) / 3
            loss.backward()
            whole += distribute.mean(loss.item()) if averaged and comm is not None else loss.item()
        return whole

    optimizer.step(closure)
    return weights(model)


@pytest.mark.parametrize(
    ("count", "averaged"), [(12, False), (10, False), (11, True)], ids=["even", "shared evenly", "averaged"]
)
def test_a_line_search_goes_by_the_mean_of_several_batches(
    worlds: Worlds, count: int, averaged: bool
) -> None:
    wanted = _search(None, count)
    for found in worlds.call(lambda comm: _search(comm, count, averaged), 2):
        assert differences(found, wanted) == []
    assert differences(weights(net()), wanted)


def test_a_mean_of_batches_that_ranks_share_differently_is_refused(worlds: Worlds) -> None:
    for told in worlds.outcomes(lambda comm: _search(comm, 11), 2):
        assert isinstance(told, BadOption)
        assert "[3, 4]" in str(told)
