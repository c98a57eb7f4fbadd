"""Gradient energy matching follows algorithm 1 of its paper, batch by batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.strategies.alone import LENGTH, Setting, finishes, gradient, run, sgd, start
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import GEM

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


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: GEM, servers: int) -> None:
    centre, pulled, _ = by_hand(strategy, 12)
    world = VirtualWorld(WORKERS, (2, 1) if servers else (3,), servers=servers)
    found = run(Setting(strategy, sgd(LR)), world)
    torch.testing.assert_close(found[0].final, centre, rtol=1e-9, atol=1e-9)
    for rank, outcome in enumerate(found):
        torch.testing.assert_close(outcome.steps[-1], pulled[rank], rtol=1e-9, atol=1e-9)


def test_staleness_is_counted_from_where_the_gradient_was_computed() -> None:
    _, _, stale = by_hand(GEM(), 12)
    for rank, outcome in enumerate(run(Setting(GEM(), sgd(LR)))):
        assert sorted(outcome.traffic.staleness.elements()) == sorted(stale[rank])


@pytest.mark.parametrize(("servers", "headers"), [(0, 0), (1, 2)])
def test_bytes_of_pulls_and_pushes_are_counted(servers: int, headers: int) -> None:
    """A vector for each step, with two parameters, each at an aligned place; a header is two numbers."""
    for outcome in run(Setting(GEM(), sgd(LR)), VirtualWorld(WORKERS, servers=servers)):
        assert outcome.traffic.exchanges == 12
        assert outcome.traffic.bytes_sent == 12 * (8 * 32 + headers * 8 * 2)
