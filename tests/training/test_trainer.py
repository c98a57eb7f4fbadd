"""The training loop: what it records, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR

from tests.trainers import trainer_by
from tests.training.blobs import blobs, model
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import NotFinite, PeerLost
from tutti.records.run import STAGES, EpochRecord
from tutti.records.texts import RunLength
from tutti.strategies import Sync
from tutti.training.metrics import METRICS
from tutti.training.progress import Moment, Progress
from tutti.training.trainer import Trainer

TRAIN, VALIDATION = blobs(205), blobs(61, seed=4)
BATCH = 20
UPDATES = 11
"""Of one epoch; the last has 5 samples."""


def trainer(comm: Communicator, lr: float = 0.1, train: Part = TRAIN, **rest: Any) -> Trainer:
    module = model()
    optimizer = SGD(module.parameters(), lr=lr, momentum=0.9)
    if "schedule" in rest:
        rest["scheduler"] = rest.pop("schedule")(optimizer)
    return trainer_by(
        Sync(),
        comm,
        module,
        optimizer,
        train,
        BATCH,
        metrics=[METRICS["accuracy"]],
        classes=4,
        validation=VALIDATION,
        **(rest if "steps" in rest else {"epochs": 3, **rest}),
    )


def run(ranks: int, **rest: Any) -> list[list[EpochRecord]]:
    """Each rank's history."""
    return VirtualWorld(ranks).run(lambda comm: trainer(comm, **rest).fit())


def test_steps_end_in_the_middle_of_an_epoch_and_that_part_is_recorded() -> None:
    for history in run(2, steps=UPDATES + 4):
        assert [(record.step, record.complete) for record in history] == [
            (UPDATES, True),
            (UPDATES + 4, False),
        ]
        assert history[1].train.samples == 4 * BATCH
        assert history[1].validation is not None


def test_the_stages_of_rank_0_add_up_to_nearly_the_total() -> None:
    (history,) = run(1)
    for record in history:
        stages, total = record.ranks[0].stages, record.seconds["total"]
        assert tuple(stages) == STAGES
        assert min(stages.values()) >= 0
        assert 0.5 * total < sum(stages.values()) <= total * (1 + 1e-9)
        assert stages["validation"] == record.seconds["validation"]
        assert record.samples_per_s > 0


def test_a_loss_that_becomes_infinite_names_step_rank_and_parameter() -> None:
    broken = TRAIN.inputs.clone()
    order = Batches(TRAIN, BATCH, seed=5).order(0)
    broken[order[2 * BATCH + BATCH - 1]] = torch.nan

    def program(comm: Communicator) -> None:
        try:
            trainer(comm, train=Part(broken, TRAIN.targets)).fit()
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
