"""Where a rank's time goes, by a clock that is set by hand and on the virtual one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.strategy import NAMES, brisk, world
from tests.contracts.training import Outcome, Run, tiny, train
from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import VirtualWorld
from tutti.optim.parameterwise import ParameterWise
from tutti.records.run import STAGES
from tutti.strategies import STRATEGIES, Sync
from tutti.strategies.measurements import Stopwatch, Traffic
from tutti.training.timers import EXCHANGE, StageTimer, look_s

SLOW = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
COST = 0.25
"""Virtual seconds of a step of the optimizer."""


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_lap_belongs_to_its_stage_and_a_start_to_none() -> None:
    hand = Hand()
    stages = StageTimer(hand)
    for now, stage in ((1.0, "data"), (3.0, "forward"), (6.0, "backward"), (7.0, "data")):
        hand.now = now
        assert stages.lap(stage) == now
    hand.now = 100.0
    assert stages.start() == 100.0
    hand.now = 101.0
    stages.lap("copy")
    taken, measuring_s = stages.take(0.125)
    assert {stage: seconds for stage, seconds in taken.items() if seconds} == {
        "data": 2.0,
        "forward": 2.0,
        "backward": 3.0,
        "copy": 1.0,
    }
    assert measuring_s == 5 * 0.125
    assert stages.take(1.0) == (dict.fromkeys(STAGES, 0.0), 0.0)


def test_no_stage_has_more_of_a_lap_than_there_is() -> None:
    hand = Hand()
    stages = StageTimer(hand)
    for now, waited in ((1.0, 0.75), (2.0, 5.0)):  # the second has waited before the lap began, too
        hand.now = now
        stages.lap("data", {"extract": waited})
    assert {stage: s for stage, s in stages.seconds().items() if s} == {"extract": 1.75, "data": 0.25}


def test_an_exchange_is_divided_into_waiting_updating_and_the_rest() -> None:
    hand = Hand()
    stages, updating = StageTimer(hand), Stopwatch(hand)
    for end in (2.0, 3.0):
        with updating:
            hand.now = end
    hand.now = 10.0
    stages.lap(EXCHANGE)
    stages.divide(Traffic(wait_s=1.5), updating)
    taken, _ = stages.take(0.0)
    assert (taken["wait"], taken["update"], taken["reduce"]) == (1.5, 3.0, 5.5)
    assert updating.seconds == 0.0


def test_a_look_at_the_clock_costs_something_in_real_time_and_nothing_in_virtual() -> None:
    assert look_s(Hand()) == 0.0
    ticks = iter(range(10_000))
    assert look_s(lambda: float(next(ticks))) == 1.01


def outcomes(run: Run, on: VirtualWorld) -> list[Outcome]:
    return on.run(train, run)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_slowest_rank_waits_for_nobody_and_the_stages_fill_the_epoch(hosts: int) -> None:
    run = Run(Sync(), epochs=2, batch_size=10, speeds=(0.5, 1.0))
    found = outcomes(run, VirtualWorld(2, 2 // hosts, SLOW))
    for record in found[0].history:
        fast, slow = (rank.stages for rank in record.ranks)
        assert fast["forward"] == pytest.approx(50 * 0.5 / 3)
        assert fast["backward"] == pytest.approx(50 * 0.5 * 2 / 3)
        assert slow["forward"] + slow["backward"] == pytest.approx(50.0)
        assert fast["wait"] - slow["wait"] == pytest.approx(25.0, rel=1e-3)
        assert 0 < slow["wait"] < 1.0
        assert sum(fast.values()) == pytest.approx(record.seconds["total"])
        assert fast["data"] == fast["copy"] == fast["checkpoint"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_no_strategy_counts_more_than_its_steps_took(name: str) -> None:
    strategy = brisk(STRATEGIES[name])
    found = outcomes(Run(strategy), world(strategy, network=SLOW))
    for record in found[0].history:
        assert sum(record.ranks[0].stages.values()) == pytest.approx(record.seconds["total"])
        assert all(min(rank.stages.values()) >= 0.0 for rank in record.ranks)


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizers_work_is_an_update(name: str) -> None:
    strategy = brisk(STRATEGIES[name])

    def program(comm: Communicator) -> tuple[float, float]:
        calls, before = [], []

        class Slow(ParameterWise):
            def move(self, weights: Tensor, gradient: Tensor, group: dict[str, object]) -> None:
                calls.append(COST)
                comm.compute(COST)
                weights.sub_(gradient, alpha=0.1)

        def model() -> nn.Module:
            made = tiny()
            made.register_forward_pre_hook(lambda *_: before.append(sum(calls)))
            return made

        def optimizer(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
            return Slow(parameters, {"lr": 0.1})

        found = train(comm, replace(Run(strategy), model=model, optimizer=optimizer))
        assert found is not None
        updates = sum(record.ranks[comm.rank].stages["update"] for record in found.history)
        return updates, sum(calls) - before[0]

    found = world(strategy).run(program)
    for updates, worked in found:
        assert updates == pytest.approx(worked)
    assert sum(updates for updates, _ in found) > 0
