"""Updates that are split by speed: sooner done, and the same training."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.optim import SGD

from tests.trainers import trainer_of
from tests.training.blobs import blobs, model
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches
from tutti.records.run import EpochRecord
from tutti.strategies import Clip, Sync
from tutti.strategies.placement import place
from tutti.training.balance import SpeedBalance
from tutti.training.losses import LOSSES
from tutti.training.precision import Arithmetic

TRAIN = blobs(1600)


FP64 = Arithmetic("fp64")


def run(slowness: list[float], balanced: bool, passes: int = 1) -> tuple[float, EpochRecord, Tensor]:
    """Virtual seconds, the last record and the final weights."""

    def program(comm: Communicator) -> tuple[EpochRecord, Tensor]:
        replica = place(FP64.prepare(model()), comm, Sync().home)
        optimizer = SGD(replica.module.parameters(), lr=0.1, momentum=0.9)
        batches = Batches(TRAIN, 40, comm.rank, comm.size, passes, seed=5)
        history = trainer_of(
            comm=comm,
            replica=replica,
            worker=Sync().worker(replica, comm, optimizer, Clip()),
            optimizer=optimizer,
            batches=batches,
            loss=LOSSES["cross_entropy"],
            epochs=3,
            arithmetic=FP64,
            balance=SpeedBalance(batches, comm) if balanced else None,
            seconds_per_sample=1e-3 * slowness[comm.rank],
        ).fit()
        return history[-1], nn.utils.parameters_to_vector(replica.module.parameters()).detach()

    world = VirtualWorld(len(slowness))
    (record, weights), *_ = world.run(program)
    return world.seconds, record, weights


@pytest.mark.parametrize("passes", [1, 2])
def test_a_rank_three_times_slower_gets_a_third_of_the_samples_and_the_weights_stay_the_same(
    passes: int,
) -> None:
    equal_s, equal, expected = run([1.0, 3.0], balanced=False, passes=passes)
    balanced_s, record, weights = run([1.0, 3.0], balanced=True, passes=passes)
    assert [rank.samples for rank in equal.ranks] == [800, 800]
    assert [rank.samples for rank in record.ranks] == [1200, 400]
    assert balanced_s < equal_s / 1.4
    assert (weights - expected).norm() < 1e-12 * expected.norm()
