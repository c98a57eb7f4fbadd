"""Callbacks see the moments of a run on every rank, and may end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.errors import BadOption, RankFailed

INPUTS = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(24, 2).float()
TARGETS = (INPUTS[:, 0] > 0).long()

OPTIONS: dict[str, Any] = {
    "data": (INPUTS, TARGETS),
    "model": "mlp",
    "model_options": {"hidden": [3]},
    "epochs": 4,
    "batch_size": 8,
    "validation": 0.25,
    "quiet": True,
}


class Diary(tutti.Callback):
    """Notes all that it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, course: tutti.Course) -> None:
        self.lines.append(f"begin {course.rank} of {course.ranks} at {course.step}")

    def step(self, course: tutti.Course) -> None:
        self.lines.append(f"step {course.step}")

    def epoch(self, course: tutti.Course, record: tutti.EpochRecord) -> None:
        assert record.validation is not None
        assert course.history[-1] == record
        self.lines.append(f"epoch {record.epoch} of {len(course.history)}")

    def end(self, course: tutti.Course) -> None:
        self.lines.append(f"end {sum(p.numel() for p in course.model.parameters())}")


class LastingDiary(Diary):
    """Keeps its notes in a resumed run, without the place of the resume."""

    def begin(self, course: tutti.Course) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lines = [*state["lines"]]


class Impatient(tutti.Callback):
    """Ends the run with epoch 2, on the last rank alone."""

    def step(self, course: tutti.Course) -> None:
        if course.rank == course.ranks - 1 and course.step == 4:
            course.stop("the last rank has seen enough")


class Failing(tutti.Callback):
    def epoch(self, course: tutti.Course, record: tutti.EpochRecord) -> None:
        if course.rank == 1:
            raise ValueError("not with me")


class Meddling(tutti.Callback):
    """Computes gradients, and leaves the model in evaluation mode."""

    def _meddle(self, course: tutti.Course) -> None:
        course.model.eval()
        course.model(torch.ones(2, 2)).sum().backward()

    def begin(self, course: tutti.Course) -> None:
        self._meddle(course)

    def step(self, course: tutti.Course) -> None:
        self._meddle(course)

    def epoch(self, course: tutti.Course, record: tutti.EpochRecord) -> None:
        self._meddle(course)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 2))


@pytest.mark.parametrize("workers", [1, 2])
def test_callbacks_cannot_disturb_the_training_by_using_the_model(workers: int) -> None:
    given = {**OPTIONS, "model_options": {}, "workers": workers, "epochs": 2}
    plain, meddled = (
        tutti.train(**{**given, "model": dropping(), "callbacks": one}).model.state_dict()
        for one in ([], Meddling())
    )
    assert all(torch.equal(plain[name], meddled[name]) for name in plain)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_moments_come_in_order_and_the_callers_object_has_what_rank_0_noted(workers: int) -> None:
    diary = Diary()
    result = tutti.train(workers=workers, callbacks=diary, **{**OPTIONS, "epochs": 2})
    steps = [f"step {number}" for number in range(1, 7)]
    assert diary.lines == [
        f"begin 0 of {workers} at 0",
        *steps[:3],
        "epoch 1 of 1",
        *steps[3:],
        "epoch 2 of 2",
        f"end {result.summary.parameters}",
    ]


@pytest.mark.parametrize("strategy", ["sync", "hogwild"])
def test_one_rank_that_asks_ends_the_run_with_the_epoch_that_is_under_way(strategy: str) -> None:
    result = tutti.train(workers=2, strategy=strategy, callbacks=[Diary(), Impatient()], **OPTIONS)
    if strategy == "sync":
        assert [record.epoch for record in result.history] == [1, 2]
    assert result.summary.ended_early == "the last rank has seen enough"


def test_callbacks_see_the_step_of_a_resumed_run(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    tutti.train(workers=1, out=out, checkpoint="1 epoch", callbacks=Diary(), **{**OPTIONS, "epochs": 2})
    diary = Diary()
    tutti.train(workers=1, resume=out, callbacks=diary, **OPTIONS)
    assert diary.lines[:2] == ["begin 0 of 1 at 6", "epoch 2 of 2"]  # its end is part of the longer run
    assert diary.lines[2:6] == ["step 7", "step 8", "step 9", "epoch 3 of 3"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_state_of_a_callback_is_resumed(tmp_path: Path, ranks: int) -> None:
    alone, diary, another = LastingDiary(), LastingDiary(), Diary()
    tutti.train(workers=2, callbacks=[alone], **OPTIONS)
    first = {**OPTIONS, "epochs": 2, "out": str(tmp_path / "run"), "checkpoint": "1 epoch"}
    tutti.train(workers=2, callbacks=[Diary(), LastingDiary()], **first)
    again = {**OPTIONS, "resume": str(tmp_path / "run")}
    tutti.train(workers=ranks, callbacks=[another, diary], **again)
    ended = [line for line in diary.lines if not line.startswith("end")]
    assert ended == [line for line in alone.lines if not line.startswith("end")]
    assert "step 1" not in another.lines


def test_an_error_in_a_callback_ends_the_run_and_names_the_rank() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1.*not with me"):
        tutti.train(workers=2, callbacks=[Failing()], **OPTIONS)


@pytest.mark.parametrize("given", [Diary, print, 3, [Diary(), None]])
def test_other_objects_are_refused_as_callbacks(given: Any) -> None:
    with pytest.raises(BadOption, match=r"tutti\.Callback"):
        tutti.train(workers=1, callbacks=given, **OPTIONS)
