"""Downpour follows the loop of its paper, batch by batch, with every option."""

from __future__ import annotations

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
from tutti.comm.virtual import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, Downpour

LR = 0.1


def by_hand(setting: Setting) -> tuple[Tensor, dict[int, Tensor], dict[int, list[int]]]:
    """Dean et al.'s loop with SGD: the centre, each worker's last weights, and what staleness it had."""
    options = setting.strategy
    assert isinstance(options, Downpour)
    centre, ranks = start(), range(len(setting.speeds))
    weights = {rank: start() for rank in ranks}
    pulled = {rank: start() for rank in ranks}
    accrued = {rank: torch.zeros(LENGTH, dtype=torch.float64) for rank in ranks}
    updates, seen, stale = 0, dict.fromkeys(ranks, 0), {rank: list[int]() for rank in ranks}
    square = torch.zeros(LENGTH, dtype=torch.float64)
    for rank, step in finishes(setting.steps, setting.speeds):
        own = gradient(weights[rank], rank, step)
        accrued[rank] = accrued[rank] + own
        weights[rank] = weights[rank] - LR * own
        if (step + 1) % options.push_every == 0:
            late, g = updates - seen[rank], accrued[rank]
            stale[rank].append(late)
            gone = centre - pulled[rank]
            if options.staleness == "inverse":
                g = g / max(1, late)
            elif options.staleness == "delay_compensated":
                g = g + (options.strength or 0.04) * g * g * gone
            elif options.staleness == "delay_compensated_adaptive":
                square = options.decay * square + (1 - options.decay) * g * g
                g = g + (options.strength or 2.0) / torch.sqrt(square + 1e-7) * g * g * gone
            centre = centre - LR * g
            accrued[rank] = torch.zeros_like(own)
            updates += 1
            seen[rank] += 1
        if (step + 1) % options.pull_every == 0:
            weights[rank] = pulled[rank] = centre
            seen[rank] = updates
        if step == setting.steps - 1 and setting.steps % options.push_every:
            centre = centre - LR * accrued[rank]
            updates += 1
    return centre, weights, stale


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
    Downpour(push_every=2, pull_every=2, staleness="delay_compensated_adaptive"),
]


@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: Downpour) -> None:
    setting = Setting(strategy)
    centre, weights, _ = by_hand(setting)
    found = run(setting)
    assert_close(found[0].final, centre)
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], weights[rank])


def test_what_is_left_is_pushed_in_the_end() -> None:
    setting = Setting(Downpour(push_every=5, pull_every=5))
    assert_close(run(setting)[0].final, by_hand(setting)[0])


@pytest.mark.parametrize("side", ["centre", "worker"])
def test_every_option_changes_the_outcome(side: str) -> None:
    strategies = [Downpour(side=side, **change) for change in ({}, {"push_every": 2}, {"pull_every": 3})]
    strategies.append(Downpour(side=side, staleness="inverse"))
    if side == "centre":
        strategies += OPTIONS[5:]
    finals = [run(Setting(strategy, sgd(LR, momentum=0.5)))[0].final for strategy in strategies]
    assert len({tuple(final.tolist()) for final in finals}) == len(finals)


def test_staleness_age_and_exchanges_are_counted() -> None:
    setting = Setting(Downpour())
    _, _, stale = by_hand(setting)
    for rank, outcome in enumerate(run(setting)):
        assert sorted(outcome.traffic.staleness.elements()) == sorted(stale[rank])
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


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "Rprop"])
def test_the_workers_share_one_state_of_the_optimizer(name: str) -> None:
    options = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}
    setting = Setting(Downpour(), lambda module: getattr(optim, name)(module.parameters(), **options))
    parameter = torch.nn.Parameter(start())
    optimizer = getattr(optim, name)([parameter], **options)
    pulled = {rank: start() for rank in range(3)}
    for rank, step in finishes(setting.steps):
        parameter.grad = gradient(pulled[rank], rank, step)
        optimizer.step()
        pulled[rank] = parameter.detach().clone()
    torch.testing.assert_close(run(setting)[0].final, parameter.detach(), rtol=1e-9, atol=1e-9)


def test_on_the_workers_side_each_has_a_state_of_its_own() -> None:
    setting = Setting(Downpour(side="worker", push_every=2, pull_every=2), sgd(LR, momentum=0.5))
    centre, velocity = start(), {rank: torch.zeros(LENGTH, dtype=torch.float64) for rank in range(3)}
    weights = {rank: start() for rank in range(3)}
    before = {rank: start() for rank in range(3)}
    for rank, step in finishes(setting.steps):
        velocity[rank] = 0.5 * velocity[rank] + gradient(weights[rank], rank, step)
        weights[rank] = weights[rank] - LR * velocity[rank]
        if step % 2:
            centre = centre + weights[rank] - before[rank]
            weights[rank] = before[rank] = centre
    assert_close(run(setting)[0].final, centre)


@pytest.mark.parametrize("strategy", [*OPTIONS, Downpour(side="worker", push_every=2)], ids=str)
def test_the_same_run_twice_is_bit_equal(strategy: Downpour) -> None:
    setting = Setting(strategy, sgd(LR, momentum=0.5), clip=Clip(norm=1.0))
    assert torch.equal(run(setting)[0].final, run(setting)[0].final)


@pytest.mark.parametrize(
    "strategy", [Downpour(), Downpour(side="worker", push_every=2, pull_every=3)], ids=str
)
def test_an_evaluation_in_between_changes_nothing(strategy: Downpour) -> None:
    setting = Setting(strategy, speeds=SPEEDS[:1])
    assert_close(run(replace(setting, settle_at=4))[0].final, run(setting)[0].final)


def test_each_worker_clips_its_own_gradient() -> None:
    setting = Setting(Downpour(), clip=Clip(value=0.2))
    centre, pulled = start(), {rank: start() for rank in range(3)}
    for rank, step in finishes(setting.steps):
        centre = centre - LR * gradient(pulled[rank], rank, step).clamp(-0.2, 0.2)
        pulled[rank] = centre
    assert_close(run(setting)[0].final, centre)


def test_the_learning_rate_of_the_pusher_counts() -> None:
    rates = iter([0.1, 0.2, 0.3])
    setting = Setting(Downpour(), lambda module: optim.SGD(module.parameters(), lr=next(rates)))
    centre, pulled = start(), {rank: start() for rank in range(3)}
    for rank, step in finishes(setting.steps):
        centre = centre - (0.1 * (rank + 1)) * gradient(pulled[rank], rank, step)
        pulled[rank] = centre
    assert_close(run(setting)[0].final, centre)


@pytest.mark.parametrize("strategy", [*OPTIONS, Downpour(side="worker", push_every=2)], ids=str)
@pytest.mark.parametrize("servers", [1, 2])
def test_servers_do_what_shared_memory_does(strategy: Downpour, servers: int) -> None:
    setting = Setting(strategy, sgd(LR, momentum=0.5))
    world = VirtualWorld(3, (2, 1), servers=servers)
    assert_close(run(setting, world)[0].final, run(setting)[0].final)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_every": 0}, "'push_every' .* is 0; expected a whole number from 1"),
        ({"pull_every": 1.5}, "'pull_every' .* is 1.5; expected a whole number"),
        ({"staleness": "some"}, "'staleness' .* expected one of none, inverse"),
        ({"side": "left"}, "'side' .* expected one of centre, worker"),
        ({"decay": 1.0}, "'decay' .* expected a number from 0 to below 1"),
        ({"strength": -1.0}, "'strength' .* expected a number from 0"),
        ({"side": "worker", "staleness": "delay_compensated"}, "use side 'centre'"),
    ],
)
def test_values_that_cannot_be_used_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Downpour(**options)


def test_several_hosts_need_a_server() -> None:
    with pytest.raises(BadOption, match="--servers 1"):
        run(Setting(Downpour()), VirtualWorld(3, (2, 1)))
