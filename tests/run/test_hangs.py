"""A rank that hangs is named, with what it did, and lost; one that takes its time is not."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests.launch.processes import wait_for_files
from tests.run.test_survival import INPUTS, OPTIONS, TARGETS, model
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.layout import MOST_PHASES
from tutti.data.parts import Part
from tutti.errors import PeerLost
from tutti.launch import supervisor
from tutti.launch.hangs import HangWatch, RankStatus
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES
from tutti.training.precision import Arithmetic


class Hanging(tutti.Callback):
    """Hangs on rank 1, once, after a step; then the file `note` exists."""

    def __init__(self, note: Path, how: str, step: int = 11) -> None:
        self._note, self._how, self._step = note, how, step

    def step(self, course: tutti.Course) -> None:
        if course.rank == 1 and course.step == self._step and not self._note.exists():
            self._note.touch()
            self.dwell()

    def dwell(self) -> None:
        if self._how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            threading.Event().wait()


def hung(tmp_path: Path, how: str, **options: Any) -> tutti.Result:
    return tutti.train(
        model(),
        workers=2,
        callbacks=Hanging(tmp_path / "hung", how),
        hang_timeout="1s",
        **{**OPTIONS, **options},
    )


@pytest.mark.parametrize("strategy", ["sync", "hogwild"])
def test_a_deadlock_is_named_with_the_stack_of_the_rank_that_is_in_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: str
) -> None:
    with pytest.raises(PeerLost, match=r"lost rank 1: it made no step for \d+ s, and waited for no other"):
        hung(tmp_path, "deadlock", strategy=strategy, epochs=200)
    said = capfd.readouterr().err
    assert "in dwell" in said
    assert said.count("in dwell") == 1


def test_a_stopped_rank_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    survived = hung(tmp_path, "stopped", on_failure="respawn")
    assert len(survived.history) == OPTIONS["epochs"]
    assert "lost rank 1: it was stopped by a signal (SIGSTOP)" in capfd.readouterr().err


class Slow(tutti.Callback):
    """Waits after an epoch until the file `named` exists."""

    def __init__(self, named: Path) -> None:
        self._named = named

    def epoch(self, course: tutti.Course, record: tutti.EpochRecord) -> None:
        if record.epoch == 2 and course.rank == 0:
            wait_for_files([self._named])


def test_long_work_after_an_epoch_is_named_but_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"

    def warn(sentence: str) -> None:
        # On a busy machine others may be named, too, and earlier.
        if sentence.startswith("rank 0 has made no progress") and "loggers run" in sentence:
            named.write_text(sentence)

    monkeypatch.setattr(supervisor, "warn_on_stderr", warn)
    result = tutti.train(model(), workers=2, callbacks=Slow(named), hang_timeout="8s", **OPTIONS)
    assert len(result.history) == OPTIONS["epochs"]


def test_a_time_without_a_unit_is_refused() -> None:
    with pytest.raises(tutti.errors.BadOption, match="hang_timeout is 'soon'"):
        tutti.train(model(), workers=2, hang_timeout="soon", **OPTIONS)


def look(watch: HangWatch, now: float, *found: RankStatus | None) -> list[int]:
    """The ranks that hang by now."""
    known = {rank: replace(one, at=one.at or now) for rank, one in enumerate(found) if one is not None}
    return list(watch.look(known, now))


def steps(made: int, *, waits: bool = False, at: float = 0.0) -> RankStatus:
    return RankStatus(1 + made, waits, at)


@pytest.fixture
def watch() -> HangWatch:
    """One that has seen two ranks make a step each second, for ten seconds."""
    watch = HangWatch(timeout_s=20)
    for now in range(1, 11):
        assert look(watch, now, steps(now), steps(now)) == []
    return watch


@pytest.mark.parametrize(("stopped", "last"), [(True, 0.0), (False, 10.0)])
def test_a_stopped_rank_is_lost_and_not_the_one_that_waits_for_it(
    watch: HangWatch, stopped: bool, last: float
) -> None:
    # A rank of this machine is seen to be stopped, one of another host gives no signs.
    second = replace(steps(10, at=last), stopped=stopped)
    for now in range(11, 30):
        assert look(watch, now, steps(10, waits=True), second) == []
    assert look(watch, 31.5, steps(10, waits=True), second) == [1]


@pytest.mark.parametrize(("waits", "hung"), [(False, [1]), (True, [0, 1])])
def test_the_rank_that_waits_for_no_other_hangs_or_all(
    watch: HangWatch, waits: bool, hung: list[int]
) -> None:
    for now in range(11, 31):
        assert look(watch, now, steps(10, waits=True), steps(10, waits=waits)) == []
    assert look(watch, 31, steps(10, waits=True), steps(10, waits=waits)) == hung


def test_a_rank_that_waits_for_one_that_has_made_a_step_since_does_not_hang(watch: HangWatch) -> None:
    for now in range(11, 15):
        look(watch, now, steps(10, waits=True), steps(now, waits=True))
    for now in range(15, 34):
        assert look(watch, now, steps(10, waits=True), steps(14, waits=True)) == []
    assert look(watch, 35, steps(10, waits=True), steps(14, waits=True)) == [0, 1]


def phase(number: int, signs: int = 0, *, waits: bool = False) -> RankStatus:
    return RankStatus(-(1 + number + MOST_PHASES * signs), waits)


def silent(watch: HangWatch, now: float, *found: RankStatus) -> list[int]:
    """The ranks that are named for their silence by now; none hangs."""
    assert look(watch, now, *found) == []
    return list(watch.silent(dict(enumerate(found)), now))


def test_a_silent_rank_is_named_once_outside_of_steps_unless_it_waits(watch: HangWatch) -> None:
    for now in range(11, 32):
        assert silent(watch, now, phase(2), phase(2, now), phase(2, waits=True)) == []
    assert silent(watch, 32, phase(2), phase(2, 32), phase(2, waits=True)) == [0]
    assert silent(watch, 33, phase(2), phase(2, 33), phase(2)) == []
    for now in range(34, 52):
        silent(watch, now, phase(3), phase(2, 33), phase(2))
    assert silent(watch, 53, phase(3), phase(2, 33), phase(2)) == [2]
    assert silent(watch, 54, phase(3), phase(2, 33), phase(2)) == [1]
    assert silent(watch, 55, phase(3), phase(2, 33), phase(2)) == [0]


def test_each_batch_of_an_evaluation_is_a_sign_of_life() -> None:
    module, part = torch.nn.Linear(4, 2).double(), Part(INPUTS, TARGETS)
    objective = Objective(LOSSES["cross_entropy"], [], 2, Arithmetic("fp64"))
    with closing(HostCommunicator.alone()) as comm:
        evaluate(module, part, comm, objective, batch_size=6)
        assert comm.peers.status()[0] == 0
        comm.peers.publish_phase(2)
        before = comm.peers.status()[0]
        evaluate(module, part, comm, objective, batch_size=6)
        assert before - comm.peers.status()[0] == 10 * MOST_PHASES


def test_a_suspended_job_does_not_hang(watch: HangWatch) -> None:
    assert look(watch, 1000, steps(10), steps(10)) == []
    assert look(watch, 1001, steps(10), steps(10)) == []


def test_a_long_step_is_ten_times_as_long_as_the_longest() -> None:
    watch = HangWatch(timeout_s=5)
    for now in range(0, 100, 4):
        look(watch, now, steps(now // 20))
    for now in range(100, 284, 4):
        assert look(watch, now, steps(4)) == []
    assert look(watch, 284, steps(4)) == [0]


def test_a_rank_that_waits_for_one_outside_training_does_not_hang(watch: HangWatch) -> None:
    for now in range(11, 200, 4):
        assert look(watch, now, steps(10, waits=True), RankStatus(0, False)) == []
