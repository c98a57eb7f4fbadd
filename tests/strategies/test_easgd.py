"""Elastic averaging, asynchronous and synchronous, follows the paper's algorithms batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.strategies.alone import Point, Setting, assert_close, finishes, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import EASGD, Clip, EASGDSync
from tutti.strategies.placement import place

LR = 0.1
WORKERS = 3


def asynchronous(strategy: EASGD, steps: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Algorithm 1 of the paper: the centre, and each x.

    After its last step a worker exchanges once more.
    """
    centre, ranks = start(), range(WORKERS)
    x = {rank: start() for rank in ranks}
    alpha = strategy.force / WORKERS
    last = {}
    for rank, step in finishes(steps):
        # The gradient was computed before the exchange.
        g = gradient(x[rank], rank, step)
        if step % strategy.every == 0:
            d = alpha * (x[rank] - centre)
            x[rank], centre = x[rank] - d, centre + d
        x[rank] = x[rank] - LR * g
        if step == steps - 1:
            last[rank] = x[rank]
            centre = centre + alpha * (x[rank] - centre)
    return centre, last


def synchronous(strategy: EASGDSync, steps: int) -> Tensor:
    centre, ranks = start(), range(WORKERS)
    x = {rank: start() for rank in ranks}
    alpha = strategy.force / WORKERS
    for step in range(steps):
        g = {rank: gradient(x[rank], rank, step) for rank in ranks}
        if step % strategy.every == 0:
            mean = torch.stack(list(x.values())).mean(0)
            for rank in ranks:
                x[rank] = x[rank] - alpha * (x[rank] - centre)
            centre = (1 - strategy.force) * centre + strategy.force * mean
        for rank in ranks:
            x[rank] = x[rank] - LR * g[rank]
    return (1 - strategy.force) * centre + strategy.force * torch.stack(list(x.values())).mean(0)


ASYNCHRONOUS = [
    EASGD(every=1),
    EASGD(every=3),
    EASGD(every=3, force=0.5),
]


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("strategy", ASYNCHRONOUS, ids=str)
def test_the_trajectory_is_the_papers(strategy: EASGD, servers: int) -> None:
    centre, weights = asynchronous(strategy, 12)
    world = VirtualWorld(WORKERS, (1, 2) if servers else (3,), servers=servers)
    found = run(Setting(strategy, sgd(LR)), world)
    assert_close(found[0].final, centre)
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], weights[rank])


SYNCHRONOUS = [EASGDSync(every=1), EASGDSync(every=3), EASGDSync(every=2, force=0.4)]


@pytest.mark.parametrize("hosts", [(3,), (1, 2)], ids=str)
@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=str)
def test_the_synchronous_trajectory_is_the_papers(strategy: EASGDSync, hosts: tuple[int, ...]) -> None:
    found = run(Setting(strategy, sgd(LR)), VirtualWorld(WORKERS, hosts))
    assert_close(found[0].final, synchronous(strategy, 12))


@pytest.mark.parametrize("strategy", [EASGD(every=10), EASGDSync(every=10)], ids=str)
def test_the_steps_since_the_last_exchange_are_not_lost(strategy: EASGD | EASGDSync) -> None:
    """A run no longer than the period moves the centre, by `force` times the workers' mean."""
    x = {rank: start() for rank in range(WORKERS)}
    for rank in x:
        for step in range(10):
            x[rank] = x[rank] - LR * gradient(x[rank], rank, step)
    found = run(Setting(strategy, sgd(LR), steps=10))[0].final
    mean = torch.stack(list(x.values())).mean(0)
    if isinstance(strategy, EASGDSync):
        assert_close(found, start() + strategy.force * (mean - start()))
    assert float((found - mean).norm()) < 0.4 * float((start() - mean).norm())


def test_a_worker_without_a_batch_does_not_hold_the_centre_back() -> None:
    """It has made no step that could be lost, and is where the centre was at first."""

    def train(comm: Communicator) -> Tensor:
        module, strategy = Point(), EASGD(every=1)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, sgd(LR)(module), Clip())
        if comm.rank == 0:
            replica.flats[0].grads.fill_(1.0)
            worker.step()
            comm.compute(1.0)
        else:
            comm.compute(2.0)
        worker.finish()
        return module().detach().clone()

    # The first worker goes back by LR, and then moves the centre by 0.9 / 2 of that.
    assert_close(VirtualWorld(2).run(train)[0], start() - 0.45 * LR)


def levels_by_hand(
    strategy: EASGD, hosts: Sequence[Sequence[int]], steps: int, server_period: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """Elastic averaging in a tree: each centre has the alpha of those who come to it."""
    top, centres, exchanges = start(), [start() for _ in hosts], [0 for _ in hosts]
    x, last = {rank: start() for ranks in hosts for rank in ranks}, {}
    of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}

    def exchange(rank: int) -> None:
        nonlocal top
        host = of[rank]
        d = strategy.force / len(hosts[host]) * (x[rank] - centres[host])
        x[rank], centres[host] = x[rank] - d, centres[host] + d
        exchanges[host] += 1
        if exchanges[host] % server_period == 0:
            exchange_above(host)

    def exchange_above(host: int) -> None:
        nonlocal top
        d = strategy.force / len(hosts) * (centres[host] - top)
        centres[host], top = centres[host] - d, top + d

    for rank, step in finishes(steps):
        g = gradient(x[rank], rank, step)
        if step % strategy.every == 0:
            exchange(rank)
        x[rank] = x[rank] - LR * g
        if step == steps - 1:
            last[rank] = x[rank]
            exchange(rank)
    for host in range(len(hosts)):
        exchange_above(host)
    return top, last


@pytest.mark.parametrize("server_period", [2, 5, 1000])
@pytest.mark.parametrize("hosts", [((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),)], ids=str)
def test_with_two_levels_each_pulls_by_its_own_number(
    hosts: tuple[tuple[int, ...], ...], server_period: int
) -> None:
    strategy = EASGD(every=2, force=0.8)
    top, last = levels_by_hand(strategy, hosts, 12, server_period)
    world = VirtualWorld(3, tuple(map(len, hosts)), servers=1, levels=2, server_period=server_period)
    found = run(Setting(strategy, sgd(LR)), world)
    assert_close(found[0].final, top)
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], last[rank])
