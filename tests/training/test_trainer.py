"""The training loop: the same run at any world size, and what it records."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR

from tests.trainers import trainer_of
from tests.training.blobs import Together, blobs, model
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import NotFinite, PeerLost
from tutti.records.run import STAGES, EpochRecord
from tutti.records.texts import RunLength
from tutti.replica import Replica
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.precision import FP32, Arithmetic
from tutti.training.progress import Moment, Progress
from tutti.training.trainer import Trainer

TRAIN, VALIDATION = blobs(205), blobs(61, seed=4)
BATCH = 20
UPDATES = 11
"""Of one epoch; the last has 5 samples."""


FP64 = Arithmetic("fp64")


def trainer(comm: Communicator, module: nn.Module, passes: int = 1, lr: float = 0.1, **rest) -> Trainer:
    replica = Replica(module)
    optimizer = SGD(module.parameters(), lr=lr, momentum=0.9)
    if "schedule" in rest:
        rest["scheduler"] = rest.pop("schedule")(optimizer)
    given = {"metrics": [METRICS["accuracy"]], "validation": VALIDATION, "classes": 4, **rest}
    if "steps" not in given:
        given.setdefault("epochs", 3)
    return trainer_of(
        comm=comm,
        replica=replica,
        worker=Together(replica, comm, optimizer),
        optimizer=optimizer,
        batches=Batches(given.pop("train", TRAIN), BATCH, comm.rank, comm.size, passes, seed=5),
        loss=LOSSES["cross_entropy"],
        **given,
    )


def run(ranks: int, make: Callable[[], nn.Module] = model, **rest) -> list[tuple[list[EpochRecord], Tensor]]:
    """Each rank's history and final weights."""

    def program(comm: Communicator) -> tuple[list[EpochRecord], Tensor]:
        trains = trainer(comm, copy.deepcopy(module), **rest)
        history = trains.fit()
        return history, torch.cat([*(flat.weights for flat in trains.replica.flats), *trains.replica.buffers])

    module = make()
    return VirtualWorld(ranks).run(program)


def sequential(
    epochs: int, arithmetic: Arithmetic = FP32, make: Callable[[], nn.Module] = model
) -> nn.Module:
    """The same run in plain torch."""
    module = arithmetic.prepare(make())
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    order = Batches(TRAIN, BATCH, seed=5)
    for epoch in range(epochs):
        for indices in order.order(epoch).split(BATCH):
            inputs, targets = TRAIN.take(indices)
            optimizer.zero_grad()
            functional.cross_entropy(
                arithmetic.forward(module, arithmetic.inputs(inputs)), targets
            ).backward()
            optimizer.step()
    return module


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_run_is_the_sequential_one_at_any_world_size(ranks: int, passes: int) -> None:
    expected = nn.utils.parameters_to_vector(sequential(3, FP64).parameters())
    for history, weights in run(ranks, lambda: FP64.prepare(model()), passes=passes, arithmetic=FP64):
        assert len(history) == 3
        assert distance(weights[weights != 0], expected) < 1e-12


def test_steps_end_in_the_middle_of_an_epoch_and_that_part_is_recorded() -> None:
    for history, _ in run(2, steps=UPDATES + 4):
        assert [(record.step, record.complete) for record in history] == [
            (UPDATES, True),
            (UPDATES + 4, False),
        ]
        assert history[1].train.samples == 4 * BATCH
        assert history[1].validation is not None


def test_the_stages_of_rank_0_add_up_to_nearly_the_total() -> None:
    (history, _), *_ = run(1)
    for record in history:
        stages, total = record.ranks[0].stages, record.seconds["total"]
        assert tuple(stages) == STAGES
        assert min(stages.values()) >= 0
        assert 0.5 * total < sum(stages.values()) <= total * (1 + 1e-9)
        assert stages["validation"] == record.seconds["validation"]
        assert record.samples_per_s > 0


def test_weights_are_written_when_they_are_final_and_before_the_last_record() -> None:
    def program(comm: Communicator) -> list[object]:
        seen: list[object] = []
        trains = trainer(
            comm,
            model(),
            on_epoch=lambda record: seen.append(record.epoch),
            checkpoint=lambda: seen.append(trains.worker.finished),
        )
        trains.fit()
        return seen

    assert VirtualWorld(2).run(program) == [[1, 2, 1, 3]] * 2


def test_a_loss_that_becomes_infinite_names_step_rank_and_parameter() -> None:
    broken = TRAIN.inputs.clone()
    order = Batches(TRAIN, BATCH, seed=5).order(0)
    broken[order[2 * BATCH + BATCH - 1]] = torch.nan

    def program(comm: Communicator) -> None:
        try:
            trainer(comm, model(), train=Part(broken, TRAIN.targets)).fit()
        except PeerLost:
            return

    with pytest.raises(
        NotFinite, match=r"the loss became nan in step 3 \(epoch 1\) on rank 1; .* '0.weight'"
    ):
        VirtualWorld(2).run(program)


def test_weights_that_the_last_update_breaks_are_an_error() -> None:
    def schedule(optimizer: Optimizer) -> LinearLR:
        optimizer.param_groups[0]["weight_decay"] = 1e30
        return LinearLR(optimizer, 1.0, 1.0)

    with pytest.raises(NotFinite, match=r"parameter '0.weight' is no longer finite after step 1"):
        run(1, lr=1e30, steps=1, schedule=schedule)


class Notes(Progress):
    """Notes the calls."""

    every_s = 0.0

    def __init__(self, *, broken: bool = False) -> None:
        self.calls: list[str] = []
        self.broken = broken

    def begin(self, span: RunLength, step: int = 0) -> None:
        self.calls.append(f"begin {span.updates} {span.per_epoch}")

    def moment(self, moment: Moment) -> None:
        self.calls.append(f"moment {moment.epoch} {moment.step} {moment.train.samples}")
        if self.broken:
            raise KeyboardInterrupt

    def doing(self, what: str, step: int | None = None) -> None:
        self.calls.append(what)

    def epoch(self, record: EpochRecord) -> None:
        self.calls.append(f"epoch {record.epoch}")

    def end(self) -> None:
        self.calls.append("end")


def test_progress_sees_moments_epochs_and_the_end() -> None:
    notes: Progress = Notes()
    run(1, steps=2, progress=notes)
    updates = [f"begin 2 {UPDATES}", "moment 1 1 20", "moment 1 2 40"]
    assert notes.calls == [*updates, "waiting for others", "validating", "epoch 1", "end"]
