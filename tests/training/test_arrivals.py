"""Who comes last to the exchanges: steps of known lengths, on a virtual clock."""

from __future__ import annotations

import torch
from torch.optim import SGD

from tests.trainers import trainer_of
from tests.training.blobs import blobs, model
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.records.run import EpochRecord, RankRecord, by_rank
from tutti.records.stragglers import straggler
from tutti.strategies import Clip, Sync
from tutti.strategies.placement import place
from tutti.training.arrivals import MOST, Arrivals, compared
from tutti.training.losses import LOSSES

PER_SAMPLE_S = 1e-3


def trained(slow: int | None, meets: bool = True) -> list[EpochRecord]:
    """The epochs of three ranks, one of which takes twice as long for a sample."""

    def run(comm: Communicator) -> list[EpochRecord]:
        replica = place(model(), comm, Sync.home)
        optimizer = SGD(replica.module.parameters(), lr=0.1)
        return trainer_of(
            comm=comm,
            replica=replica,
            worker=Sync().worker(replica, comm, optimizer, Clip()),
            optimizer=optimizer,
            batches=Batches(blobs(60), 12, comm.rank, comm.size),
            loss=LOSSES["cross_entropy"],
            metrics=[],
            epochs=2,
            seconds_per_sample=PER_SAMPLE_S * (2 if comm.rank == slow else 1),
            meets=meets,
        ).fit()

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


def test_what_was_noted_before_is_not_compared_again() -> None:
    noted = Arrivals()
    for _ in range(MOST + 10):
        noted.note(1.0)
    other = Arrivals()
    for _ in range(MOST + 7):
        other.note(2.0)
    found = compared([(RankRecord(), noted.take()), (RankRecord(samples=3), other.take())])
    assert [(one.compared, one.last, one.own_s, one.samples) for one in found] == [
        (MOST, 0, 1.0, 0),
        (MOST, MOST, 2.0, 3),
    ]
    assert compared([(RankRecord(), noted.take()), (RankRecord(), other.take())]) == [RankRecord()] * 2
