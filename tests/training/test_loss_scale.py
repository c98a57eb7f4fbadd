"""Half precision: the loss is scaled, small gradients are there, and steps with an overflow are left out."""

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
from tutti.data import Batches
from tutti.errors import NotFinite
from tutti.replica import Replica
from tutti.strategies import EASGD, Clip, Gossip, Hogwild, Local, ParamServer, Solo, Strategy, Sync
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training.loss_scale import FIRST, GROWS_AFTER, LossScale
from tutti.training.losses import Loss
from tutti.training.precision import Arithmetic
from tutti.training.skipped_updates import OVERFLOWS, SkippedUpdates

ROUNDING = 2.0**-11
"""Of a number in half precision."""


def tiny(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients are zero in half precision: the smallest number there is 2 ** -24."""
    return nn.functional.cross_entropy(outputs, targets) * 2.0**-30


def huge(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients, times the first scale, overflow in half precision: the largest is 65,504."""
    return nn.functional.cross_entropy(outputs, targets) * 2.0**8


OF = {
    function: Loss(function.__name__, function, lambda outputs, targets, classes: None)
    for function in (tiny, huge)
}


def trained(strategy: Strategy, loss: Loss, ranks: int, precision: str, lr: float) -> tuple[Tensor, int]:
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
        replica, scale, found = Replica(nn.Linear(2, 1)), LossScale(), []
        updates = SkippedUpdates(replica, comm, True, 0, scale)
        for step in range(GROWS_AFTER + 2):
            replica.flats[0].grads.fill_(math.inf if step == 1 and comm.rank == 1 else scale.factor)
            made = updates.is_usable(step + 1, 0)
            assert made == (step != 1)
            assert replica.flats[0].grads.unique().tolist() == ([1.0] if made else [0.0])
            found.append(scale.factor)
        return found

    for found in VirtualWorld(2).run(program):
        assert found == [FIRST, *[FIRST / 2] * GROWS_AFTER, FIRST]


def test_what_is_never_finite_ends_the_run() -> None:
    def program(comm: Communicator) -> None:
        replica = Replica(nn.Linear(2, 1))
        updates = SkippedUpdates(replica, comm, True, 0, LossScale())
        for step in range(OVERFLOWS + 1):
            replica.flats[0].grads.fill_(math.nan)
            assert not updates.is_usable(step + 1, 0)

    with pytest.raises(NotFinite, match=rf"step {OVERFLOWS + 1} .*--precision fp16"):
        VirtualWorld(1).run(program)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_too_small_for_half_precision_train_as_in_single_precision(ranks: int) -> None:
    strategy, loss = Solo() if ranks == 1 else Sync(), OF[tiny]
    (weights, steps), (found, made) = (
        trained(strategy, loss, ranks, one, 2.0**27) for one in ("fp32", "fp16")
    )
    (start, _) = trained(strategy, loss, ranks, "fp32", 1e-30)
    assert made == steps == 24 * ranks
    # Each step is rounded in inputs, weights, both products and their gradients.
    assert (found - weights).norm() < 24 * 5 * ROUNDING * (weights - start).norm() / 2


@pytest.mark.parametrize(
    "strategy",
    [Sync(), ParamServer(), Local(every=2), Gossip(), Hogwild(), EASGD(every=2)],
    ids=lambda s: s.name,
)
def test_steps_with_an_overflow_are_left_out_by_every_pace(strategy: Strategy) -> None:
    start, all_steps = trained(strategy, OF[huge], 2, "fp32", 1e-30)
    weights, made = trained(strategy, OF[huge], 2, "fp16", 2.0**-10)
    assert 0 < made < all_steps
    assert weights.isfinite().all()
    assert not torch.allclose(weights, start)
