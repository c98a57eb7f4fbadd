"""Validation that stops training, and validation that does not: the same figures."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import tests.forked  # noqa: F401  It says what the server that forks has imported.
from tests.trainers import trainer_of
from tests.training.blobs import Apart, blobs, model
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches
from tutti.errors import BadOption, TuttiError
from tutti.load_object import load_object
from tutti.records.run import EpochRecord
from tutti.replica import Replica
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS, Metric
from tutti.training.validation import background
from tutti.training.validation.background import Background

TRAIN, VALIDATION = blobs(205), blobs(61, seed=4)
LOSS = LOSSES["cross_entropy"]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


# Each row of all ranks, once.
SEEN = Metric(name="seen", function=lambda one, its: len(one) + 1000 * int(its.sum()), width=0)


def run(
    validate: str, ranks: int = 2, norm: bool = True
) -> list[tuple[list[EpochRecord], Tensor, list[int]]]:
    """Each rank's history, final weights, and the epochs in the order in which their records came."""

    def program(comm: Communicator) -> tuple[list[EpochRecord], Tensor, list[int]]:
        seen: list[int] = []
        replica = Replica(model(norm=True))
        optimizer = SGD(replica.module.parameters(), lr=0.1, momentum=0.9)
        history = trainer_of(
            comm=comm,
            replica=replica,
            worker=Apart(replica, comm, optimizer),
            optimizer=optimizer,
            batches=Batches(TRAIN, 20, comm.rank, comm.size, seed=5, own=True),
            loss=LOSS,
            metrics=[METRICS["accuracy"], SEEN],
            classes=4,
            epochs=4,
            validation=VALIDATION,
            validate=validate,
            on_epoch=lambda record: seen.append(record.epoch),
        ).fit()
        return history, nn.utils.parameters_to_vector(replica.module.parameters()).detach(), seen

    return VirtualWorld(ranks).run(program)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_but_the_moment_of_validation_differs(ranks: int) -> None:
    expected, found = run("pause", ranks), run("background", ranks)
    for (paused, weights, _), (history, others, seen) in zip(expected, found, strict=True):
        assert torch.equal(weights, others)
        assert seen == [1, 2, 3, 4]
        for one, other in zip(paused, history, strict=True):
            assert one.validation.samples == 61
            assert one.validation.confusion == other.validation.confusion
            assert one.validation.metrics == other.validation.metrics
            assert other.validation.loss == pytest.approx(one.validation.loss, rel=1e-6)
            assert one.train == other.train


OBJECTIVE = Objective(LOSS, [METRICS["accuracy"], SEEN], 4)


@pytest.mark.parametrize("room", [0, 1 << 28])
def test_snapshots_are_of_the_weights_at_their_time_however_many_there_is_room_for(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "SNAPSHOT_BYTES", room)

    def program(comm: Communicator) -> None:
        replica = Replica(model(norm=True))
        background = Background(replica, VALIDATION, comm, OBJECTIVE)
        expected = []
        for turn in range(5):
            with torch.no_grad():
                replica.flats[0].weights.mul_(1.0 + 0.1 * turn)
                replica.buffers[0].add_(0.1)
            background.begin()
            expected.append(evaluate(replica.module, VALIDATION, comm, OBJECTIVE).total(comm))
        own = [replica.flats[0].weights.clone(), *(buffer.clone() for buffer in replica.buffers)]
        found = background.collect(everything=True)
        background.close()
        assert found == expected
        parameter = next(replica.module.parameters())
        assert parameter.data_ptr() == replica.flats[0].weights.data_ptr()
        assert all(map(torch.equal, own, [replica.flats[0].weights, *replica.buffers]))
        assert len({evaluation.loss for evaluation in found}) == 5

    VirtualWorld(1).run(program)


@pytest.fixture
def not_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets its time on a busy machine, too."""
    monkeypatch.setattr(background, "PROGRAM", background.PROGRAM.replace("os.nice(19); ", ""))


def beside(comm: Communicator, module: nn.Module) -> Background:
    metrics = [METRICS["accuracy"]]
    return Background(Replica(module), VALIDATION, comm, Objective(LOSS, metrics))


def found_beside(comm: Communicator, one: Background) -> dict[str, float]:
    """Training never waits for the other process; these tests do."""
    one.begin()
    assert one._connection.poll(100)
    one._poll()
    (found,) = one.collect(everything=False)
    one.close()
    return found.metrics


class Broken(nn.Linear):
    """Fails in another process: by an error, or by a signal."""

    def __init__(self, killed: bool) -> None:
        super().__init__(12, 4)
        self.killed, self.parent = killed, os.getpid()

    def forward(self, inputs: Tensor) -> Tensor:
        if os.getpid() != self.parent:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such class")
        return super().forward(inputs)


@pytest.mark.usefixtures("not_nice")
@pytest.mark.parametrize(
    ("killed", "error", "said"),
    [
        (False, RuntimeError, r"(?s)beside training failed.*no such class"),
        (True, TuttiError, r"was killed, .*--validate pause"),
    ],
)
def test_what_fails_beside_training_is_an_error_of_training(
    killed: bool, error: type[Exception], said: str
) -> None:
    def program(comm: Communicator) -> None:
        one = beside(comm, Broken(killed))
        try:
            with pytest.raises(error, match=said):
                found_beside(comm, one)
        finally:
            one.close()

    VirtualWorld(1).run(program)


def test_a_model_that_cannot_be_pickled_is_refused() -> None:
    module = model()
    module.lock = threading.Lock()
    with pytest.raises(BadOption, match=r"cannot be done \(TypeError: .*lock.*; use --validate pause"):
        VirtualWorld(1).run(lambda comm: beside(comm, module))


@pytest.mark.usefixtures("not_nice")
def test_a_model_of_a_file_is_evaluated_by_the_same_file_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = "import os, torch\nclass Mine(torch.nn.Linear):\n    def forward(self, inputs):\n"
    file.write_text(
        f"{text}        assert os.getpid() != {os.getpid()}\n        return super().forward(inputs)"
    )
    module = cast("Callable[..., nn.Module]", load_object(f"{file}:Mine", "model"))(12, 4)
    (found,) = VirtualWorld(1).run(lambda comm: found_beside(comm, beside(comm, module)))
    assert found.keys() == {"accuracy"}
