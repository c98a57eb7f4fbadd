"""The lazy parameter server: bounded staleness, and gradients that are kept when they have hardly changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, optim

from tests.strategies.alone import LENGTH, SPEEDS, Setting, assert_close, gradient, run, sgd, start
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Lazy

LR = 0.1
UNBOUND = 1000


def moments(
    steps: int, slack: int, speeds: Sequence[float]
) -> tuple[list[tuple[float, str, int, int]], float]:
    """When each worker pushes the gradient of a step and reads the weights for the next; the last moment.

    Ho et al.: step c + 1 begins when all workers have pushed those of step c - slack, at weights that have
    them.
    """
    pushes: dict[tuple[int, int], float] = {}
    found = []
    for step in range(steps):
        for rank, speed in enumerate(speeds):
            waited_for = [pushes[other, step - slack - 1] for other in range(len(speeds)) if step > slack]
            begins = max([pushes[rank, step - 1], *waited_for] if step else [0.0])
            found.append((begins, "read", rank, step))
            pushes[rank, step] = begins + speed
            found.append((begins + speed, "push", rank, step))
    # What is pushed at the moment of a reading is what that has waited for.
    return sorted(found, key=lambda moment: (moment[0], moment[1] == "read")), max(pushes.values())


def by_hand(
    strategy: Lazy, steps: int, speeds: Sequence[float] = SPEEDS, momentum: float = 0.0
) -> tuple[Tensor, dict[int, int]]:
    """The centre, and how many gradients each worker has kept to itself."""
    centre, velocity, eta = start(), torch.zeros(LENGTH).double(), LR / (1 - momentum)
    workers = range(len(speeds))
    weights, sent = dict.fromkeys(workers, centre), dict[int, Tensor]()
    moves: dict[int, list[float]] = {rank: [] for rank in workers}
    kept = dict.fromkeys(workers, 0)
    for _, what, rank, step in moments(steps, strategy.slack, speeds)[0]:
        if what == "read":
            if step:
                moves[rank].append(float(((centre - weights[rank]) ** 2).sum()))
            weights[rank] = centre
            continue
        g = gradient(weights[rank], rank, step)
        allowed = strategy.threshold * sum(moves[rank][-strategy.memory :]) / (eta * len(speeds)) ** 2
        if rank in sent and ((g - sent[rank]) ** 2).sum() <= allowed:
            kept[rank] += 1
        else:
            sent[rank] = g
        velocity = momentum * velocity + sent[rank]
        centre = centre - LR * velocity
    return centre, kept


OPTIONS = [
    Lazy(slack=UNBOUND, threshold=0.1),
    Lazy(slack=UNBOUND, threshold=5.0),
    Lazy(slack=UNBOUND, threshold=5.0, memory=2),
]


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: Lazy, servers: int) -> None:
    """Where a gradient is kept, the centre applies the last one again."""
    centre, kept = by_hand(strategy, 15)
    world = VirtualWorld(3, (2, 1) if servers else (3,), servers=servers)
    found = run(Setting(strategy, sgd(LR), steps=15), world)
    assert_close(found[0].final, centre)
    assert {rank: outcome.traffic.skipped for rank, outcome in enumerate(found)} == kept
    assert strategy.threshold < 1 or sum(kept.values()) > 0


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("slack", [0, 1, 4])
def test_no_worker_is_further_ahead_than_the_bound(slack: int, servers: int) -> None:
    speeds = (1.0, 3.1, 0.77)
    seconds = moments(10, slack, speeds)[1]
    strategy = Lazy(slack=slack, threshold=0.0)
    if slack == 0:  # All begin a batch at the same moment; only the speeds decide.
        assert seconds == pytest.approx(31.0)
    found = run(Setting(strategy, sgd(LR), 10, speeds), VirtualWorld(3, servers=servers))
    assert_close(found[0].final, by_hand(strategy, 10, speeds)[0])
    assert found[0].seconds == pytest.approx(seconds, abs=0.1)
    # The fastest one waits for the slowest for all but its own work and the head start.
    assert found[2].traffic.wait_s == pytest.approx(10 * (3.1 - 0.77) - slack * 3.1, abs=3.2)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("slack", [0, 1, UNBOUND])
def test_staleness_is_what_others_pushed_between_reading_and_pushing(slack: int, servers: int) -> None:
    speeds = (1.0, 3.1, 0.77)
    pushed, stale = dict.fromkeys(range(3), 0), {rank: Counter[int]() for rank in range(3)}
    read = dict.fromkeys(range(3), 0)
    for _, what, rank, _ in moments(10, slack, speeds)[0]:
        others = sum(pushed.values()) - pushed[rank]
        if what == "read":
            read[rank] = others
        else:
            stale[rank][others - read[rank]] += 1
            pushed[rank] += 1
    found = run(Setting(Lazy(slack=slack), sgd(LR), 10, speeds), VirtualWorld(3, servers=servers))
    assert {rank: outcome.traffic.staleness for rank, outcome in enumerate(found)} == stale


def test_a_kept_gradient_is_not_sent() -> None:
    strategies = Lazy(slack=UNBOUND, threshold=0.0), Lazy(slack=UNBOUND, threshold=5.0)
    always, lazy = [run(Setting(strategy, sgd(LR), steps=15))[0].traffic for strategy in strategies]
    assert always.bytes_sent == 15 * always.bytes_sent / always.exchanges
    assert lazy.bytes_sent == (15 - lazy.skipped) * always.bytes_sent / 15


def test_a_threshold_needs_sgd() -> None:
    setting = Setting(Lazy(threshold=0.1), lambda module: optim.Adam(module.parameters()))
    with pytest.raises(BadOption, match=r"use '--optimizer sgd', or '--strategy.threshold 0'"):
        run(setting)
    run(replace(setting, strategy=Lazy()))
