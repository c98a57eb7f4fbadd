"""A device that computes while the CPU goes on: losses that stay there, and steps that are replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.trainers import trainer_of
from tests.training.blobs import blobs, model
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batch, Batches
from tutti.errors import NotFinite
from tutti.records.run import EpochRecord
from tutti.replica import Replica
from tutti.strategies import Clip, Solo
from tutti.training.cuda_graph import WARM, CudaRecorder, GraphedPass, Pass, Work, can_be_recorded
from tutti.training.evaluation import Objective
from tutti.training.losses import LOSSES, Loss
from tutti.training.metrics import METRICS
from tutti.training.precision import Arithmetic

TRAIN, BATCH, EPOCHS = blobs(105), 20, 3
WHOLE = EPOCHS * 5
"""Batches of 20; each epoch has one of 5 besides."""


class Late(Arithmetic):
    """As on a GPU, nobody reads a number of the step just told."""

    is_asynchronous = True


class Replaying(CudaRecorder):
    """Records as CUDA graphs do: what was recorded reads and writes the same memory each time."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.calls = replica, list[str]()

    def aside(self, work: Work) -> Pass:
        self.calls.append("aside")
        return work()

    def record(self, work: Work) -> tuple[Pass, Callable[[], None]]:
        before = [flat.grads.clone() for flat in self.replica.flats]
        results = work()
        for flat, grads in zip(self.replica.flats, before, strict=True):
            flat.grads.copy_(grads)

        def replay() -> None:
            self.calls.append("replay")
            for place, new in zip(results, work(), strict=True):
                place.copy_(new)

        return results, replay


def trained(
    captures: bool, passes: int = 1, lr: float = 0.1, arithmetic: type[Arithmetic] = Late
) -> tuple[list[EpochRecord], torch.Tensor, list[str]]:
    """The history, the final weights and what was recorded or replayed."""

    def program(comm) -> tuple[list[EpochRecord], torch.Tensor, list[str]]:
        replica = Replica(arithmetic("fp64").prepare(model()))
        optimizer = SGD(replica.module.parameters(), lr=lr, momentum=0.9)
        batches = Batches(TRAIN, BATCH, passes=passes, seed=5)
        loss, metrics, recorder = LOSSES["cross_entropy"], [METRICS["accuracy"]], Replaying(replica)
        objective = Objective(loss, metrics, arithmetic=arithmetic("fp64"))
        captured = GraphedPass(replica, batches, objective, recorder) if captures else None
        history = trainer_of(
            comm=comm,
            replica=replica,
            worker=Solo().worker(replica, comm, optimizer, Clip()),
            optimizer=optimizer,
            batches=batches,
            loss=loss,
            metrics=metrics,
            epochs=EPOCHS,
            arithmetic=arithmetic("fp64"),
            compute=captured,
        ).fit()
        return history, replica.flats[0].weights.clone(), recorder.calls

    return VirtualWorld(1).run(program)[0]


def figures(history: list[EpochRecord]) -> list[tuple[int, float, float]]:
    return [(one.train.samples, one.train.loss, one.train.metrics["accuracy"]) for one in history]


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("captures", [False, True])
def test_what_a_device_is_told_ahead_trains_the_same(passes: int, captures: bool) -> None:
    expected, weights, _ = trained(captures=False, passes=passes, arithmetic=Arithmetic)
    found, others, _ = trained(captures, passes)
    for (samples, loss, accuracy), wanted in zip(figures(found), figures(expected), strict=True):
        assert (samples, loss, accuracy) == (wanted[0], pytest.approx(wanted[1], rel=1e-12), wanted[2])
    torch.testing.assert_close(others, weights, rtol=0, atol=1e-12)
    assert found[-1].train.loss < found[0].train.loss / 2


@pytest.mark.parametrize("captures", [False, True])
def test_a_loss_that_is_not_finite_is_found_out_later_but_is_found(captures: bool) -> None:
    with pytest.raises(NotFinite, match=r"the loss became (nan|inf) in steps 1 to 6 \(epoch 1\)"):
        trained(captures, lr=1e308)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *_: None)
    return module


class Own(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("module", "can"),
    [
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            True,
        ),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), True),
        (nn.Sequential(Own(2, 2)), False),
        (nn.Sequential(nn.BatchNorm1d(2, momentum=None)), False),
        (nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), False),
        (hooked(), False),
    ],
)
def test_only_what_is_known_to_do_the_same_each_step_is_recorded(module: nn.Module, can: bool) -> None:
    assert can_be_recorded(module, LOSSES["mse"]) is can
    assert not can_be_recorded(module, Loss("own", nn.functional.mse_loss))


def test_a_replay_counts_as_a_gradient_of_all_that_it_writes() -> None:
    class Zero(Replaying):
        """Its replays add zeros, which cannot be told from no gradient by looking."""

        def record(self, work: Work) -> tuple[Pass, Callable[[], None]]:
            results = work()
            self.replica.zero_grad()
            return results, lambda: None

    module = model()
    module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    replica = Replica(module)
    captured = GraphedPass(
        replica,
        Batches(TRAIN, BATCH),
        Objective(LOSSES["cross_entropy"], arithmetic=Late()),
        Zero(replica),
    )
    for _ in range(WARM + 3):
        captured(Batch(torch.arange(4), torch.arange(4), 1.0))
        (unused,) = replica.gradients.missing()
        assert unused is module.unused
        replica.zero_grad()
