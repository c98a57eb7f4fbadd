"""The training loop: the same run at any world size, and what it records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR

from tests.trainers import Forgetful, trainer_of
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import NotFinite, PeerLost
from tutti.records.run import STAGES, EpochRecord
from tutti.records.texts import RunLength
from tutti.replica import Replica
from tutti.strategies import Clip, Sync
from tutti.strategies.placement import place
from tutti.training.evaluation import Objective
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.precision import FP32, Arithmetic
from tutti.training.progress import Moment, Progress
from tutti.training.trainer import Trainer

GENERATOR = torch.Generator().manual_seed(3)
CENTRES = 2 * torch.randn(4, 12, generator=GENERATOR)


def blobs(samples: int) -> Part:
    """Four clouds of points, a class each."""
    targets = torch.randint(0, 4, (samples,), generator=GENERATOR)
    return Part(CENTRES[targets] + torch.randn(samples, 12, generator=GENERATOR), targets)


TRAIN, VALIDATION = blobs(205), blobs(61)
BATCH = 20
UPDATES = 11
"""Of one epoch; the last has 5 samples."""


FP64 = Arithmetic("fp64")
OBJECTIVE = Objective(LOSSES["cross_entropy"], [METRICS["accuracy"]], 4)


@dataclass
class Averaging(Forgetful):
    """Sums the gradients over the ranks and runs the user's optimizer everywhere."""

    replica: Replica
    comm: Communicator
    optimizer: Optimizer
    finished: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def step(self) -> None:
        for flat in self.replica.flats:
            self.comm.all_reduce(flat.grads)
        self.optimizer.step()
        self.replica.zero_grad()

    def finish(self) -> None:
        self.finished += 1


def model(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(12, 16), middle, nn.Tanh(), nn.Linear(16, 4))


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
        worker=Averaging(replica, comm, optimizer),
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


class Cooling(nn.Module):
    """A model whose outputs depend on how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.layers(inputs) / (1 + self.passes)


def test_ranks_without_samples_in_an_epochs_last_batch_count_its_passes_too() -> None:
    ranks = BATCH // 3
    assert len(TRAIN) % BATCH < ranks
    alone = sequential(2, FP64, Cooling)
    expected = nn.utils.parameters_to_vector(alone.parameters())
    with torch.no_grad():
        outputs = alone.eval()(VALIDATION.inputs.double())
    loss = functional.cross_entropy(outputs, VALIDATION.targets).item()
    for history, weights in run(ranks, lambda: FP64.prepare(Cooling()), arithmetic=FP64, epochs=2):
        assert distance(weights[weights != 0], expected) < 1e-12
        assert history[1].validation.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("every", [1, 2])
def test_the_loop_drives_a_strategy_with_shared_weights(every: int) -> None:
    def program(comm: Communicator) -> Tensor:
        strategy, module = Sync(every=every), copy.deepcopy(start)
        replica = place(module, comm, strategy.home)
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        trains = trainer_of(
            comm=comm,
            replica=replica,
            worker=strategy.worker(replica, comm, optimizer, Clip()),
            optimizer=optimizer,
            batches=Batches(TRAIN, BATCH, comm.rank, comm.size, strategy.passes, seed=5),
            loss=LOSSES["cross_entropy"],
            epochs=3,
            validation=VALIDATION,
            arithmetic=FP64,
        )
        trains.fit()
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    start = FP64.prepare(model())
    expected = nn.utils.parameters_to_vector(sequential(3, FP64).parameters())
    for weights in VirtualWorld(5, ranks_per_host=[2, 3]).run(program):
        assert distance(weights, expected) < 1e-12


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
