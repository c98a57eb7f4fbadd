"""Losses that are sums over samples, beside losses that are means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.own_loop.jobs import differences
from tests.own_loop.loops.base import fit, net, samples, sgd, weights
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.own_loop.origins import Origin, SampleCounts, note_origin, sums_samples


def _train(comm: Communicator | None, count: int, batch_size: int) -> list[dict[str, Tensor]]:
    first, second = net(), net(4)
    optimizers = [sgd(first), sgd(second)]
    loader = DataLoader(samples(count), batch_size)
    if comm is not None:
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
        distribute.distribute(first, optimizers[0])
        distribute.distribute(second, optimizers[1], reduction="sum")
    for inputs, targets in loader if comm is None else distribute.shard(loader):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean = fit(first, inputs, targets)
        total = nn.functional.cross_entropy(second(inputs), targets, reduction="sum")
        (mean + total).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(first, second)


@pytest.mark.parametrize(
    ("count", "batch_size"), [(8, 4), (11, 4), (9, 4)], ids=["even", "uneven", "one left"]
)
def test_a_sum_beside_a_mean_is_that_of_the_whole_batch(worlds: Worlds, count: int, batch_size: int) -> None:
    wanted = _train(None, count, batch_size)
    for found in worlds.call(lambda comm: _train(comm, count, batch_size), 2):
        assert differences(found, wanted) == []
    assert differences(weights(net(), net(4)), wanted)


ALL, OWN = 10, 5
LOSSES: dict[str, tuple[bool, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "sum": (True, lambda out, goal, weight: (out - goal).square().sum()),
    "sum over each dimension": (True, lambda out, goal, weight: (out - goal).square().sum(1).sum()),
    "half a sum": (True, lambda out, goal, weight: 0.5 * (out - goal).square().sum()),
    "scaled sum": (
        True,
        lambda out, goal, weight: nn.functional.mse_loss(out, goal, reduction="sum") * 65536,
    ),
    "negative sum": (True, lambda out, goal, weight: -(out.log_softmax(1) * goal).sum()),
    "sum beside a mean": (True, lambda out, goal, weight: out.mean() + out.exp().sum()),
    "sum by all samples": (True, lambda out, goal, weight: (out - goal).square().sum() / ALL),
    "cross entropy": (
        True,
        lambda out, goal, weight: nn.functional.cross_entropy(out, goal.argmax(1), reduction="sum"),
    ),
    "mean": (False, lambda out, goal, weight: (out - goal).square().mean()),
    "accumulated mean": (False, lambda out, goal, weight: nn.functional.mse_loss(out, goal) / 4),
    "mean of sums": (False, lambda out, goal, weight: (out - goal).square().sum(1).mean()),
    "sum of means": (False, lambda out, goal, weight: (out @ out.new_ones(3, OWN)).mean(0).sum()),
    "sum by samples": (False, lambda out, goal, weight: (out - goal).square().sum() / len(out)),
    "sum times a part": (False, lambda out, goal, weight: (out - goal).square().sum() * (1 / out.numel())),
    "weighted mean": (False, lambda out, goal, weight: (out.exp() * goal.exp()).sum() / goal.exp().sum()),
    "decay": (False, lambda out, goal, weight: out.square().mean() + 1e-3 * weight.square().sum()),
    "several terms": (False, lambda out, goal, weight: torch.stack([out.mean()] * OWN).sum()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_over_samples_is_told_from_a_mean(name: str) -> None:
    summed, loss = LOSSES[name]
    model = nn.Linear(4, 3)
    out, weight = model(torch.ones(OWN, 4)), nn.Parameter(torch.ones(OWN, 2))
    note_origin(out, Origin((SampleCounts(OWN, ALL),), None))
    assert sums_samples(loss(out, torch.rand(OWN, 3), weight).grad_fn, OWN, ALL)[1] == summed


def test_a_sum_is_refused_unless_distribute_is_told(worlds: Worlds) -> None:
    def train(reduction: str | None) -> str:
        model = net()
        distribute.distribute(model, sgd(model), reduction=reduction)
        inputs, targets = next(iter(distribute.shard(DataLoader(samples(8), 8))))
        try:
            nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
        except BadOption as error:
            return str(error)
        return ""

    def work(comm: Communicator) -> list[str]:
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
        return [train(reduction) for reduction in ("sum", "mean", None)]

    for told in worlds.call(work, 2):
        assert told[:2] == ["", ""]
        assert "reduction='sum'" in told[2]


def _search(comm: Communicator | None, count: int, averaged: bool = False) -> list[dict[str, Tensor]]:
    """A line search by the loss of all batches of 4."""
    model = net()
    optimizer: Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    loader: Iterable[list[Tensor]] = DataLoader(samples(count), 4)
    if comm is not None:
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
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


def _return_nothing(comm: Communicator | None) -> list[dict[str, Tensor]]:
    model = net()
    optimizer = sgd(model)
    loader: Iterable[list[Tensor]] = DataLoader(samples(11), 4)
    if comm is not None:
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
        distribute.distribute(model, optimizer)
        loader = distribute.shard(loader)
    for inputs, targets in loader:
        optimizer.zero_grad()

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> None:
            fit(model, inputs, targets).backward()

        optimizer.step(cast("Callable[[], float]", closure))
    return weights(model)


def test_a_closure_may_return_nothing(worlds: Worlds) -> None:
    for found in worlds.call(_return_nothing, 2):
        assert differences(found, _return_nothing(None)) == []


def _clip_in_a_closure(comm: Communicator | None, name: str, limit: float) -> list[dict[str, Tensor]]:
    model = net()
    optimizer = sgd(model)
    loader: Iterable[list[Tensor]] = DataLoader(samples(11), 4)
    if comm is not None:
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
        distribute.distribute(model, optimizer, **{name: limit})  # type: ignore[arg-type]
        loader = distribute.shard(loader)
    for inputs, targets in loader:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> float:
            optimizer.zero_grad()
            loss = fit(model, inputs, targets)
            loss.backward()
            if comm is None and name == "clip_norm":
                assert nn.utils.clip_grad_norm_(model.parameters(), limit) > 2 * limit
            elif comm is None:
                assert any(bool((p.grad.abs() > 2 * limit).any()) for p in model.parameters())
                nn.utils.clip_grad_value_(model.parameters(), limit)
            return loss.item()

        optimizer.step(closure)
    return weights(model)


@pytest.mark.parametrize(("name", "limit"), [("clip_norm", 0.05), ("clip_value", 0.02)])
def test_the_gradient_of_a_closure_is_clipped(worlds: Worlds, name: str, limit: float) -> None:
    wanted = _clip_in_a_closure(None, name, limit)
    for found in worlds.call(lambda comm: _clip_in_a_closure(comm, name, limit), 2):
        assert differences(found, wanted) == []


def test_a_limit_of_each_element_is_kept_without_one_of_the_norm(worlds: Worlds) -> None:
    def limited(comm: Communicator) -> list[list[float]]:
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        distribute.distribute(model, optimizer, clip_value=0.5)
        model(torch.tensor([[0.25, 100.0]], dtype=torch.float64)).sum().backward()
        optimizer.step()
        return cast("list[list[float]]", model.weight.tolist())

    assert worlds.call(limited, 2) == [[[-0.25, -0.5]]] * 2
