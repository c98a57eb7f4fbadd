"""Asynchronous DiLoCo follows its paper, batch by batch and message by message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import LENGTH, SPEEDS, Setting, assert_close, finishes, gradient, run, start
from tests.strategies.test_diloco import adamw
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.parameter_server.remote import RemoteServer
from tutti.strategies import AsyncDiLoCo, DiLoCo
from tutti.strategies.async_diloco import local_steps


class Server:
    """Algorithm 3 of the paper, line by line."""

    def __init__(self, options: AsyncDiLoCo, workers: int) -> None:
        self.options, self.theta, self.t, self.n = options, start(), 0, options.delay or workers
        self.m = self.delta = torch.zeros(LENGTH, dtype=torch.float64)

    def receive(self, g: Tensor) -> None:
        lr, beta = self.options.outer_lr, self.options.outer_momentum
        self.delta = self.delta + g
        if (self.t + 1) % self.n == 0:
            self.m = beta * self.m + self.delta / self.n
            self.theta = self.theta - lr * (beta * self.m + g / self.n)
            self.delta = torch.zeros_like(g)
        else:
            self.theta = self.theta - lr * g / self.n
        self.t += 1


def by_hand(strategy: AsyncDiLoCo, steps: int) -> tuple[Tensor, list[Tensor]]:
    """The centre in the end, and the last weights of each worker."""
    workers = len(SPEEDS)
    server = Server(strategy, workers)
    x = [nn.Parameter(start()) for _ in range(workers)]
    began = [start() for _ in range(workers)]
    optimizers = [optim.AdamW([weights], lr=0.05, weight_decay=0.1) for weights in x]
    for rank, step in finishes(steps):
        x[rank].grad = gradient(x[rank].detach(), rank, step)
        optimizers[rank].step()
        if (step + 1) % strategy.every == 0:
            server.receive(began[rank] - x[rank].detach())
            x[rank].data.copy_(server.theta)
            began[rank] = server.theta
        elif step + 1 == steps:
            server.receive(began[rank] - x[rank].detach())
    return server.theta, [weights.detach() for weights in x]


OPTIONS = [
    AsyncDiLoCo(every=3),
    AsyncDiLoCo(every=5),
    AsyncDiLoCo(every=3, delay=1),
    AsyncDiLoCo(every=1, delay=4, outer_lr=0.5, outer_momentum=0.25),
]


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: AsyncDiLoCo, servers: int) -> None:
    setting = Setting(strategy, adamw, steps=12)
    centre, weights = by_hand(strategy, setting.steps)
    found = run(setting, VirtualWorld(3, servers=servers))
    assert_close(found[0].final, centre)
    for outcome, expected in zip(found, weights, strict=True):
        assert_close(outcome.steps[-1], expected)


@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_a_separate_centre_makes_the_same_trajectory(
    strategy: AsyncDiLoCo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUTTI_CENTRE_KEY", "a key of the tests")
    server = RemoteServer(b"a key of the tests", tmp_path / "centre", workers=3)
    address = server.listen("127.0.0.1:0")
    setting = Setting(replace(strategy, centre=address), adamw, steps=12)
    centre, weights = by_hand(strategy, setting.steps)
    found = run(setting, VirtualWorld(3))
    assert_close(found[0].final, centre)
    for outcome, expected in zip(found, weights, strict=True):
        assert_close(outcome.steps[-1], expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_without_delay_is_diloco(momentum: float) -> None:
    found, expected = (
        run(Setting(kind(every=5, outer_momentum=momentum), adamw, speeds=(1.0,)))[0].final
        for kind in (AsyncDiLoCo, DiLoCo)
    )
    assert_close(found, expected)


def test_staleness_and_exchanges_are_counted() -> None:
    """Workers of equal speed bring their messages in turn: each is behind those of the others."""
    setting = Setting(AsyncDiLoCo(every=4), adamw, steps=12, speeds=(1.0, 1.001, 1.002))
    for rank, outcome in enumerate(run(setting)):
        assert outcome.traffic.exchanges == 3
        assert outcome.traffic.staleness == {rank: 1, 2: 2} if rank < 2 else {2: 3}
        assert outcome.traffic.bytes_sent == 3 * 8 * 32  # two parameters, each at an aligned place


@pytest.mark.parametrize(("dynamic", "expected"), [(True, [10, 5, 2]), (False, [10, 10, 10])])
def test_slower_workers_make_fewer_batches_in_a_round(dynamic: bool, expected: list[int]) -> None:
    """After the workers have met, all rounds take as long as the fastest worker's."""
    speeds, strategy = (1.0, 2.0, 4.0), AsyncDiLoCo(every=10, dynamic=dynamic)
    for rank, outcome in enumerate(run(Setting(strategy, steps=60, speeds=speeds, settle_at=19))):
        assert outcome.traffic.exchanges == 2 + -(-40 // expected[rank])


@pytest.mark.parametrize(
    ("own", "fastest", "expected"),
    [(1.0, 1.0, 20), (0.0, 0.0, 20), (1.6, 1.0, 12), (0.3, 0.1, 6), (99.0, 1.0, 1)],
)
def test_the_batches_of_a_round_follow_from_the_speeds(own: float, fastest: float, expected: int) -> None:
    assert local_steps(20, own, fastest) == expected


def test_a_separate_centre_is_for_several_hosts_and_needs_no_servers() -> None:
    strategy = AsyncDiLoCo(centre="host:7070")
    strategy.check(workers=4, hosts=2)
    with pytest.raises(BadOption, match="leave --servers out"):
        strategy.check(workers=4, hosts=2, servers=1)
