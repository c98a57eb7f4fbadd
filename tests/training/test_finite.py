"""Losses and gradients that are not finite: the rank is named, and the update skipped; half precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.trainers import trainer_by
from tests.training.blobs import blobs
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import BadOption, NotFinite
from tutti.records.run import EpochRecord
from tutti.replica import Replica
from tutti.run.config import TrainConfig
from tutti.strategies import STRATEGIES, Solo, Strategy, Sync
from tutti.training.finite import LossScale, SkippedUpdates
from tutti.training.losses import LOSSES, Loss
from tutti.training.precision import Arithmetic
from tutti.training.trainer import Trainer

GENERATOR = torch.Generator().manual_seed(11)
SAMPLES, BATCH = 48, 12
INPUTS = torch.randn(SAMPLES, 5, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)


PLAIN = LOSSES["cross_entropy"]


class Poison(torch.autograd.Function):
    """The identity, whose gradient is NaN for inputs with a 7 in front; the loss of such inputs is finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: Tensor) -> Tensor:
        ctx.poisoned = bool((inputs[:, 0] == 7).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (math.nan if ctx.poisoned else 1.0), None


class Net(nn.Module):
    """Two layers, and statistics of the inputs; those with a 7 in front make gradients NaN, NaN all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mean = nn.BatchNorm1d(5, affine=False), nn.Buffer(torch.zeros(5))
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        self.norm(inputs)  # its statistics alone
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)  # another tensor each time
        return self.last(Poison.apply(self.first(inputs).tanh(), inputs))


def spoiled(how: float | None, samples: tuple[int, ...] = (17,)) -> Part:
    """The data, some samples of which begin with a number."""
    inputs = INPUTS.clone()
    if how is not None:
        inputs[list(samples), 0] = how
    return Part(inputs, TARGETS)


def trainer(comm: Communicator, train: Part, strategy: Strategy, loss: Loss = PLAIN, **rest: Any) -> Trainer:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    given = {"arithmetic": Arithmetic("fp64"), "epochs": 2, "skip_nonfinite": 3, **rest}
    return trainer_by(strategy, comm, net, optimizer, train, BATCH, loss=loss, **given)


def trained(
    ranks: int, train: Part, strategy: Strategy, hosts: list[int] | None = None, **rest: Any
) -> list[tuple[Tensor, list[EpochRecord]]]:
    """For each rank the final weights and statistics in one vector, and the epochs."""

    def run(comm: Communicator) -> tuple[Tensor, list[EpochRecord]]:
        made = trainer(comm, train, strategy, **rest)
        history = made.fit()
        values = made.replica.module.state_dict().values()
        return torch.cat([value.double().flatten() for value in values]), history

    return VirtualWorld(ranks, ranks_per_host=hosts).run(run)


def expected(train: Part, loss: Loss = PLAIN, epochs: int = 2) -> Tensor:
    """The weights and statistics after the updates without a spoiled sample, by one process."""
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = Batches(train, BATCH, seed=5)
    for epoch in range(epochs):
        for _, (batch,) in batches.epoch(epoch):
            if (batch.inputs[:, 0].isnan() | (batch.inputs[:, 0] == 7)).any():
                continue
            optimizer.zero_grad()
            loss.function(net(batch.inputs), batch.targets).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


SEVEN_AND_NAN = pytest.mark.parametrize("how", [7.0, math.nan], ids=["gradient", "loss"])


@SEVEN_AND_NAN
@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        (Sync(), None),
        (Sync(), [2, 1]),
        (Sync(collective="ring"), None),
        (STRATEGIES["paramserver"](), None),
    ],
    ids=["sync", "sync-hosts", "ring", "paramserver"],
)
def test_all_ranks_skip_an_update_that_is_not_finite_on_one(
    how: float, strategy: Strategy, hosts: list[int] | None
) -> None:
    train = spoiled(how)
    reference = expected(train)
    for vector, history in trained(3, train, strategy, hosts):
        torch.testing.assert_close(vector[-len(reference) :], reference, rtol=0, atol=1e-12)
        assert [sum(rank.left_out for rank in epoch.ranks) for epoch in history] == [1, 1]
        assert {rank.updates for epoch in history for rank in epoch.ranks} == {SAMPLES // BATCH - 1}
        assert vector.isfinite().all()


@SEVEN_AND_NAN
@pytest.mark.parametrize(
    "name",
    ["hogwild", "downpour", "easgd", "lazy", "local", "gossip", "adpsgd", "diloco", "noloco", "async_diloco"],
)
def test_a_worker_with_steps_of_its_own_leaves_out_one_and_goes_on(how: float, name: str) -> None:
    results = trained(2, spoiled(how), STRATEGIES[name](), epochs=1)
    assert all(vector.isfinite().all() for vector, _ in results)
    [epoch] = results[0][1]
    rounds = SAMPLES // BATCH // 2
    assert sorted((rank.updates, rank.left_out) for rank in epoch.ranks) == [(rounds - 1, 1), (rounds, 0)]


def test_the_rank_the_step_and_the_parameter_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    trained(3, spoiled(7.0), Sync(), epochs=1)
    line = capfd.readouterr().err
    assert "the gradient of 'first.weight' is not finite, though the loss is in step" in line
    assert "the update is skipped" in line
    trained(3, spoiled(math.nan), Sync(), epochs=1)
    assert "the loss is nan in step" in capfd.readouterr().err


def test_more_in_a_row_than_allowed_end_the_run() -> None:
    everything = spoiled(7.0, tuple(range(SAMPLES)))
    with pytest.raises(
        NotFinite, match=r"in step 3 \(epoch 1\) on rank 0; --skip-nonfinite skips 2 updates in a row"
    ):
        trained(1, everything, STRATEGIES["solo"](), skip_nonfinite=2)


@pytest.mark.parametrize("given", [{"precision": "fp16"}, {"parallel": "tensor"}, {"device": "cuda"}])
def test_it_is_refused_where_gradients_are_not_looked_at(given: dict[str, str]) -> None:
    with pytest.raises(BadOption, match="does not go with --skip-nonfinite 3"):
        TrainConfig(skip_nonfinite=3, **given)


ROUNDING = 2.0**-11
"""Of a number in half precision."""


def tiny(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients are zero in half precision: the smallest number there is 2 ** -24."""
    return nn.functional.cross_entropy(outputs, targets) * 2.0**-30


def huge(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients, times the first scale, overflow in half precision: the largest is 65,504."""
    return nn.functional.cross_entropy(outputs, targets) * 2.0**8


OF = {function: Loss(function.__name__, function) for function in (tiny, huge)}


def in_precision(strategy: Strategy, loss: Loss, ranks: int, precision: str, lr: float) -> tuple[Tensor, int]:
    """The weights, and how many steps the ranks made."""

    def program(comm: Communicator) -> tuple[Tensor, int]:
        part = blobs(60)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(part.inputs.shape[1], 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = SGD(module.parameters(), lr=lr)
        given = {"loss": loss, "arithmetic": Arithmetic(precision), "epochs": 8}
        trainer = trainer_by(strategy, comm, module, optimizer, part, 20, **given)
        history = trainer.fit()
        weights = torch.cat([flat.weights for flat in trainer.replica.flats]).clone()
        return weights, sum(rank.updates for record in history for rank in record.ranks)

    found: tuple[Tensor, int] = VirtualWorld(ranks).run(program)[0]
    return found


def test_an_overflow_halves_the_scale_on_all_who_step_together_and_many_steps_double_it() -> None:
    def program(comm: Communicator) -> list[float]:
        replica, scale, found = Replica(nn.Linear(2, 1)), LossScale(), []
        updates = SkippedUpdates(replica, comm, comm, 0, scale)
        for step in range(LossScale.GROWS_AFTER + 2):
            replica.flats[0].grads.fill_(math.inf if step == 1 and comm.rank == 1 else scale.factor)
            made = updates.is_usable(step + 1, 0)
            assert made == (step != 1)
            assert replica.flats[0].grads.unique().tolist() == ([1.0] if made else [0.0])
            found.append(scale.factor)
        return found

    for found in VirtualWorld(2).run(program):
        assert found == [LossScale.FIRST, *[LossScale.FIRST / 2] * LossScale.GROWS_AFTER, LossScale.FIRST]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_too_small_for_half_precision_train_as_in_single_precision(ranks: int) -> None:
    strategy, loss = Solo() if ranks == 1 else Sync(), OF[tiny]
    (weights, steps), (found, made) = (
        in_precision(strategy, loss, ranks, one, 2.0**27) for one in ("fp32", "fp16")
    )
    (start, _) = in_precision(strategy, loss, ranks, "fp32", 1e-30)
    assert made == steps == 24 * ranks
    # Each step is rounded in inputs, weights, both products and their gradients.
    assert (found - weights).norm() < 24 * 5 * ROUNDING * (weights - start).norm() / 2
