"""Losses and gradients that are not finite, and the scale of the loss in half precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.trainers import trainer_of
from tests.training.blobs import blobs
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.errors import NotFinite
from tutti.replica import Replica
from tutti.strategies import (
    Clip,
    Solo,
    Strategy,
    Sync,
)
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training.finite import OVERFLOWS, LossScale
from tutti.training.losses import Loss
from tutti.training.precision import Arithmetic

ROUNDING = 2.0**-11
"""Of a number in half precision."""


def tiny(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients are zero in half precision: the smallest number there is 2 ** -24."""
    return nn.functional.cross_entropy(outputs, targets) * 2.0**-30


def in_precision(strategy: Strategy, loss: Loss, ranks: int, precision: str, lr: float) -> tuple[Tensor, int]:
    """The weights, and how many steps the ranks made."""

    def program(comm: Communicator) -> tuple[Tensor, int]:
        part = blobs(60)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(part.inputs.shape[1], 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = SGD(module.parameters(), lr=lr)
        replica = place(module, comm, strategy.home)
        trainer = trainer_of(
            comm=comm,
            replica=replica,
            worker=strategy.worker(replica, comm, optimizer, Clip()),
            optimizer=optimizer,
            loss=loss,
            arithmetic=Arithmetic(precision),
            batches=Batches(part, 20, comm.rank, comm.size, own=strategy.pace is not Pace.TOGETHER),
            epochs=8,
        )
        history = trainer.fit()
        weights = torch.cat([flat.weights for flat in replica.flats]).clone()
        return weights, sum(rank.updates for record in history for rank in record.ranks)

    found: tuple[Tensor, int] = VirtualWorld(ranks).run(program)[0]
    return found


def test_an_overflow_halves_the_scale_on_all_who_step_together_and_many_steps_double_it() -> None:
    def program(comm: Communicator) -> list[float]:
        replica, found = Replica(nn.Linear(2, 1)), []
        scale = LossScale(replica, comm, together=True)
        for step in range(LossScale.GROWS_AFTER + 2):
            replica.flats[0].grads.fill_(math.inf if step == 1 and comm.rank == 1 else scale.factor)
            made = scale.is_usable(step + 1, 0)
            assert made == (step != 1)
            assert replica.flats[0].grads.unique().tolist() == ([1.0] if made else [0.0])
            found.append(scale.factor)
        return found

    for found in VirtualWorld(2).run(program):
        assert found == [LossScale.FIRST, *[LossScale.FIRST / 2] * LossScale.GROWS_AFTER, LossScale.FIRST]


@pytest.mark.parametrize(("together", "ended"), [(True, [0, 1]), (False, [1])])
def test_too_many_overflows_in_a_row_end_the_run(together: bool, ended: list[int]) -> None:
    def program(comm: Communicator) -> str:
        replica = Replica(nn.Linear(2, 1))
        scale = LossScale(replica, comm, together)
        try:
            for step in range(OVERFLOWS + 1):
                replica.flats[0].grads.fill_(math.inf if comm.rank == 1 else 1.0)
                scale.is_usable(step + 1, 0)
        except NotFinite as error:
            return str(error)
        return ""

    found = VirtualWorld(2).run(program)
    assert [rank for rank, said in enumerate(found) if said] == ended
    assert f"the last in step {OVERFLOWS + 1} (epoch 1) on rank 1: 'weight' is not finite" in found[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_too_small_for_half_precision_train_as_in_single_precision(ranks: int) -> None:
    strategy, loss = Solo() if ranks == 1 else Sync(), Loss("tiny", tiny)
    (weights, steps), (found, made) = (
        in_precision(strategy, loss, ranks, one, 2.0**27) for one in ("fp32", "fp16")
    )
    (start, _) = in_precision(strategy, loss, ranks, "fp32", 1e-30)
    assert made == steps == 24 * ranks
    # Each step is rounded in inputs, weights, both products and their gradients.
    assert (found - weights).norm() < 24 * 5 * ROUNDING * (weights - start).norm() / 2
