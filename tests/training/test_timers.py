"""Where a rank's time goes, by a clock that is set by hand and on the virtual one."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.training import Outcome, Run, train
from tests.trainers import trainer_by
from tests.training.blobs import blobs, model
from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import VirtualWorld
from tutti.records.run import STAGES, EpochRecord, by_rank
from tutti.records.stragglers import straggler
from tutti.strategies import ParamServer, Sync
from tutti.strategies.measurements import Stopwatch, Traffic
from tutti.training.timers import EXCHANGE, StageTimer

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
    taken = stages.take()
    assert {stage: seconds for stage, seconds in taken.items() if seconds} == {
        "data": 2.0,
        "forward": 2.0,
        "backward": 3.0,
        "copy": 1.0,
    }
    assert stages.take() == dict.fromkeys(STAGES, 0.0)


def test_an_exchange_is_divided_into_waiting_updating_and_the_rest() -> None:
    hand = Hand()
    stages, updating = StageTimer(hand), Stopwatch(hand)
    for end in (2.0, 3.0):
        with updating:
            hand.now = end
    hand.now = 10.0
    stages.lap(EXCHANGE)
    stages.divide(Traffic(wait_s=1.5), updating)
    taken = stages.take()
    assert (taken["wait"], taken["update"], taken["reduce"]) == (1.5, 3.0, 5.5)
    assert updating.seconds == 0.0


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


PER_SAMPLE_S = 1e-3


def trained(slow: int | None, meets: bool = True) -> list[EpochRecord]:
    """The epochs of three ranks, one of which takes twice as long for a sample."""

    def run(comm: Communicator) -> list[EpochRecord]:
        module, cost = model(), PER_SAMPLE_S * (2 if comm.rank == slow else 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        given = {"epochs": 2, "seconds_per_sample": cost, "meets": meets}
        return trainer_by(Sync(), comm, module, optimizer, blobs(60), 12, **given).fit()

    return VirtualWorld(3).run(run)[0]


def test_a_delay_that_hides_in_the_exchange_is_laid_to_who_has_it() -> None:
    history = trained(slow=1)
    assert [(rank.compared, rank.last) for rank in history[-1].ranks] == [(5, 0), (5, 5), (5, 0)]
    assert history[-1].ranks[0].own_s == torch.tensor(4 * PER_SAMPLE_S).item()
    found = straggler(by_rank(history))
    assert found is not None
    assert (found.rank, found.share, round(found.ratio, 6)) == (1, 1.0, 2.0)


def test_nothing_is_compared_of_workers_that_do_not_meet() -> None:
    assert [rank.compared for rank in trained(slow=1, meets=False)[-1].ranks] == [0, 0, 0]


def test_a_late_worker_leaves_out_what_the_others_have_done() -> None:
    speeds = (1e-3, 1e-3, 50e-3)
    found = {
        quorum: VirtualWorld(3).run(train, Run(ParamServer(quorum=quorum), speeds=speeds, batch_size=9))
        for quorum in (1.0, 0.6)
    }
    everyone, most = (found[quorum][0] for quorum in (1.0, 0.6))
    assert [record.train.samples for record in everyone.history] == [100, 100]
    late = most.history[0].ranks[2]
    assert late.skipped > 3
    assert late.dropped >= 1
    assert 67 <= most.history[0].train.samples < 90
    assert most.seconds < everyone.seconds / 3
