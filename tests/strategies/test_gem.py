"""Gradient energy matching follows algorithm 1 of its paper, batch by batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tests.strategies.alone import (
    LENGTH,
    SPEEDS,
    Point,
    Setting,
    assert_close,
    finishes,
    gradient,
    run,
    sgd,
    start,
)
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import GEM, Clip
from tutti.strategies.placement import place

LR = 0.05
WORKERS = 3


def by_hand(strategy: GEM, steps: int) -> tuple[Tensor, dict[int, Tensor], dict[int, list[int]]]:
    """The centre, what each worker pulled last, and the staleness of each one's gradients."""
    centre, ranks, updates = start(), range(WORKERS), 0
    s, m = {rank: start() for rank in ranks}, {rank: torch.zeros(LENGTH).double() for rank in ranks}
    seen, stale = dict.fromkeys(ranks, 0), {rank: list[int]() for rank in ranks}
    for rank, step in finishes(steps):
        dw = -LR * gradient(s[rank], rank, step)
        w = centre
        m[rank] = strategy.momentum * m[rank] + dw
        room = strategy.amplification * m[rank].abs() - (w - s[rank]).abs()
        pi = (room / (dw.abs() + 1e-16)).clamp(strategy.least, strategy.most)
        centre = centre + pi * dw
        s[rank] = w
        stale[rank].append(updates - seen[rank])
        seen[rank], updates = updates + 1, updates + 1
    return centre, s, stale


OPTIONS = [
    GEM(),
    GEM(momentum=0.5),
    GEM(amplification=2.0),
    GEM(least=-1.0),
    GEM(most=2.0),
    GEM(least=-math.inf, most=math.inf),
]


@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: GEM) -> None:
    centre, pulled, _ = by_hand(strategy, 12)
    found = run(Setting(strategy, sgd(LR)))
    torch.testing.assert_close(found[0].final, centre, rtol=1e-9, atol=1e-9)
    for rank, outcome in enumerate(found):
        torch.testing.assert_close(outcome.steps[-1], pulled[rank], rtol=1e-9, atol=1e-9)


def test_every_option_changes_the_outcome() -> None:
    finals = [run(Setting(strategy, sgd(LR)))[0].final for strategy in OPTIONS]
    assert len({tuple(final.tolist()) for final in finals}) == len(finals)


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_do_what_shared_memory_does(servers: int) -> None:
    centre, _, _ = by_hand(GEM(), 12)
    found = run(Setting(GEM(), sgd(LR)), VirtualWorld(WORKERS, (2, 1), servers=servers))
    torch.testing.assert_close(found[0].final, centre, rtol=1e-9, atol=1e-9)


def test_staleness_is_counted_from_where_the_gradient_was_computed() -> None:
    _, _, stale = by_hand(GEM(), 12)
    for rank, outcome in enumerate(run(Setting(GEM(), sgd(LR)))):
        assert sorted(outcome.traffic.staleness.elements()) == sorted(stale[rank])


@pytest.mark.parametrize(("servers", "headers"), [(0, 0), (1, 2)])
def test_what_a_worker_sends_for_its_pulls_and_for_its_pushes_is_counted(servers: int, headers: int) -> None:
    """A vector for each step, with two parameters, each at an aligned place; a header is two numbers."""
    for outcome in run(Setting(GEM(), sgd(LR)), VirtualWorld(WORKERS, servers=servers)):
        assert outcome.traffic.exchanges == 12
        assert outcome.traffic.bytes_sent == 12 * (8 * 32 + headers * 8 * 2)


def test_the_update_may_be_another_optimizers() -> None:
    def adam(module: nn.Module) -> Optimizer:
        return optim.Adam(module.parameters(), lr=LR)

    found = run(Setting(GEM(), adam, steps=30))
    assert found[0].final.isfinite().all()
    assert not torch.equal(found[0].final, run(Setting(GEM(), sgd(LR), steps=30))[0].final)


def test_the_same_run_twice_is_bit_equal() -> None:
    setting = Setting(GEM(), sgd(LR), clip=Clip(norm=0.5))
    assert torch.equal(run(setting)[0].final, run(setting)[0].final)


def test_an_evaluation_in_between_changes_nothing() -> None:
    setting = Setting(GEM(), sgd(LR), speeds=SPEEDS[:1])
    assert_close(run(replace(setting, settle_at=4))[0].final, run(setting)[0].final)


def test_the_proxys_momentum_is_lost_with_the_weights_that_it_was_for() -> None:
    """What moves the new weights first is one plain step, as in the beginning."""

    def train(comm: Communicator) -> Tensor:
        module, strategy = Point(), GEM()
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, sgd(LR)(module), Clip())
        replica.flats[0].grads.fill_(3.0)
        worker.step()
        replica.flats[0].weights.fill_(0.25)
        worker.adopt()
        replica.flats[0].grads.fill_(1.0)
        worker.step()
        worker.finish()
        return module().detach().clone()

    assert_close(VirtualWorld(1).run(train)[0], torch.full_like(start(), 0.25 - LR))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "'momentum' .* expected a number from 0 to below 1"),
        ({"amplification": 0.0}, "'amplification' .* expected a number above 0"),
        ({"amplification": math.inf}, "'amplification' .* expected a number above 0"),
        ({"least": 2.0}, "'least' .* expected a number to 1"),
        ({"most": 0.5}, "'most' .* expected a number from 1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        GEM(**options)
