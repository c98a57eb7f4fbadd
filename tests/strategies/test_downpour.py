"""Downpour follows the loop of its paper, batch by batch, with every option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, optim

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
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, Downpour

LR = 0.1


class Server:
    """Dean et al.'s parameter server with plain SGD, and what the other papers add to it."""

    def __init__(self, options: Downpour, workers: int) -> None:
        self.options, self.weights, self.updates = options, start(), 0
        self.fetched_at, self.own_since = [0] * workers, [0] * workers
        self.stale: list[list[int]] = [[] for _ in range(workers)]
        self.mean_square = torch.zeros(LENGTH, dtype=torch.float64)

    def fetch(self, rank: int) -> Tensor:
        self.fetched_at[rank], self.own_since[rank] = self.updates, 0
        return self.weights

    def push(self, rank: int, g: Tensor, at: Tensor) -> None:
        """Apply a gradient that was computed at the weights `at`."""
        late, rate, moved = self.updates - self.fetched_at[rank] - self.own_since[rank], LR, self.weights - at
        self.stale[rank].append(late)
        if self.options.staleness == "inverse":
            rate = LR / max(1, late)
        elif self.options.staleness == "delay_compensated":
            g = g + (self.options.strength or 0.04) * g * g * moved
        elif self.options.staleness == "delay_compensated_adaptive":
            self.mean_square = self.options.decay * self.mean_square + (1 - self.options.decay) * g * g
            g = g + (self.options.strength or 2.0) / torch.sqrt(self.mean_square + 1e-7) * g * g * moved
        self.weights = self.weights - rate * g
        self.updates += 1
        self.own_since[rank] += 1


def client(server: Server, rank: int, steps: int) -> Iterator[Tensor]:
    """Algorithm 1 of their appendix, line by line; a batch is computed in each `yield` of the weights."""
    options, accrued, parameters = server.options, torch.zeros(LENGTH, dtype=torch.float64), server.weights
    for step in range(steps):
        if step % options.pull_every == 0:
            parameters = server.fetch(rank)
        g, at = gradient(parameters, rank, step), parameters
        yield parameters
        accrued = accrued + g
        parameters = parameters - LR * g
        if (step + 1) % options.push_every == 0:
            server.push(rank, accrued, at)
            accrued = torch.zeros_like(g)
    if steps % options.push_every:
        server.push(rank, accrued, parameters)
    yield server.weights if steps % options.pull_every == 0 else parameters


def by_hand(setting: Setting) -> tuple[Tensor, dict[int, Tensor], list[list[int]]]:
    """The centre, each worker's last weights, and what staleness it had."""
    assert isinstance(setting.strategy, Downpour)
    server = Server(setting.strategy, len(setting.speeds))
    clients = [client(server, rank, setting.steps) for rank in range(len(setting.speeds))]
    weights = {rank: next(one) for rank, one in enumerate(clients)}
    for rank, _ in finishes(setting.steps, setting.speeds):
        weights[rank] = next(clients[rank])
    return server.weights, weights, server.stale


OPTIONS = [
    Downpour(),
    Downpour(push_every=3),
    Downpour(pull_every=2),
    Downpour(push_every=2, pull_every=4),
    Downpour(staleness="inverse"),
    Downpour(staleness="delay_compensated"),
    Downpour(staleness="delay_compensated", strength=0.4),
    Downpour(staleness="delay_compensated_adaptive"),
    Downpour(staleness="delay_compensated_adaptive", strength=0.5, decay=0.5),
    Downpour(pull_every=3, staleness="delay_compensated"),
    Downpour(pull_every=2, staleness="delay_compensated_adaptive"),
    Downpour(push_every=2, pull_every=4, staleness="inverse"),
]


@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: Downpour) -> None:
    setting = Setting(strategy)
    centre, weights, _ = by_hand(setting)
    found = run(setting)
    assert_close(found[0].final, centre)
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], weights[rank])


def test_the_rest_is_pushed_at_the_end() -> None:
    setting = Setting(Downpour(push_every=5, pull_every=5))
    assert_close(run(setting)[0].final, by_hand(setting)[0])


def test_staleness_age_and_exchanges_are_counted() -> None:
    setting = Setting(Downpour())
    _, _, stale = by_hand(setting)
    for rank, outcome in enumerate(run(setting)):
        assert sorted(outcome.traffic.staleness.elements()) == sorted(stale[rank])
        assert sum(stale[rank]) > 0
        assert outcome.traffic.exchanges == setting.steps
        assert outcome.traffic.bytes_sent >= setting.steps * 8 * LENGTH
        assert max(outcome.traffic.ages_s) == pytest.approx(SPEEDS[rank], abs=0.01)


@pytest.mark.parametrize("side", ["centre", "worker"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Adafactor"])
def test_one_worker_trains_as_plain_torch_does(name: str, side: str) -> None:
    options = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}
    setting = Setting(
        Downpour(side=side),
        lambda module: getattr(optim, name)(module.parameters(), **options),
        speeds=SPEEDS[:1],
        clip=Clip(norm=2.0),
    )
    module = Point()
    optimizer = setting.optimizer(module)
    for step in range(setting.steps):
        own = gradient(module().detach(), 0, step)
        own *= min(1.0, 2.0 / (float(own.norm()) + 1e-6))
        module.first.grad, module.second.grad = own[:3].clone(), own[3:].clone()
        optimizer.step()
    torch.testing.assert_close(run(setting)[0].final, module().detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_stale_gradient_is_used_at_a_smaller_rate_by_any_optimizer(name: str, servers: int) -> None:
    """Adam's steps are as long as the rate is large, however small the gradient (Zhang et al. 2016)."""

    def made(parameters: list[torch.nn.Parameter]) -> optim.Optimizer:
        return getattr(optim, name)(parameters, lr=0.05)

    speeds = tuple(1 + 0.013 * rank for rank in range(6))
    workers = range(len(speeds))
    centre = torch.nn.Parameter(start())
    central, read_at = made([centre]), dict.fromkeys(workers, 0)
    pulled = dict.fromkeys(workers, start())
    for updates, (rank, step) in enumerate(finishes(4, speeds)):
        tau = max(1, updates - read_at[rank])
        g = gradient(pulled[rank], rank, step)
        centre.grad, central.param_groups[0]["lr"] = g, 0.05 / tau
        central.step()
        read_at[rank], pulled[rank] = updates + 1, centre.detach().clone()
    setting = Setting(
        Downpour(staleness="inverse"), lambda module: made(list(module.parameters())), 4, speeds
    )
    assert_close(run(setting, VirtualWorld(6, servers=servers))[0].final, centre.detach())
    undamped = run(replace(setting, strategy=Downpour()))[0].final
    assert float((centre.detach() - start()).norm()) < 0.6 * float((undamped - start()).norm())


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("clip", [Clip(), Clip(value=0.2)], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "Rprop"])
def test_workers_share_one_state_and_bring_their_own_clipped_gradients_and_rates(
    name: str, clip: Clip, servers: int
) -> None:
    options, rates = {"momentum": 0.9} if name == "SGD" else {}, iter([0.05, 0.06, 0.07, 0.08])
    setting = Setting(
        Downpour(),
        lambda module: getattr(optim, name)(module.parameters(), next(rates), **options),
        clip=clip,
    )
    parameter = torch.nn.Parameter(start())
    optimizer = getattr(optim, name)([parameter], 0.05, **options)
    pulled = {rank: start() for rank in range(3)}
    for rank, step in finishes(setting.steps):
        own = gradient(pulled[rank], rank, step)
        parameter.grad = own if clip.value is None else own.clamp(-clip.value, clip.value)
        optimizer.param_groups[0]["lr"] = 0.05 + 0.01 * rank
        optimizer.step()
        pulled[rank] = parameter.detach().clone()
    found = run(setting, VirtualWorld(3, servers=servers))[0].final
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", [*OPTIONS, Downpour(side="worker", push_every=2)], ids=str)
@pytest.mark.parametrize("servers", [1, 2])
def test_servers_do_what_shared_memory_does(strategy: Downpour, servers: int) -> None:
    setting = Setting(strategy, sgd(LR, momentum=0.5))
    world = VirtualWorld(3, (2, 1), servers=servers)
    assert_close(run(setting, world)[0].final, run(setting)[0].final)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": "worker", "staleness": "inverse"}, "use side 'centre'"),
        ({"push_every": 2, "staleness": "delay_compensated"}, "use push_every 1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Downpour(**options)
