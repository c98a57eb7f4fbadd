"""A rank that hangs is named, with what it did, and lost; one that takes its time is not."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest

import tutti
from tests.run.test_survival import OPTIONS, model
from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import BEAT, FIRST_STEP, PID, WAITS, ControlLayout, control_bytes
from tutti.errors import PeerLost
from tutti.launch.hangs import HangWatch, RemoteHangWatch
from tutti.launch.liveness import LivenessAddress, LivenessWatch, Sign
from tutti.launch.rank_processes import RankProcess


class Hanging(tutti.Callback):
    """Hangs on rank 1, once, behind a step.

    Args:
        note: a file that is there once it has.
        how: the way in which it does.
    """

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


class Doing(tutti.Callback):
    """Takes its time on rank 1 before the first step, and on rank 0 behind an epoch.

    Args:
        what: it does meanwhile.
        when: "begin" or "epoch".
    """

    def __init__(self, what: Callable[[], object], when: str) -> None:
        self._what, self._when = what, when

    def begin(self, course: tutti.Course) -> None:
        if self._when == "begin" and course.rank == 1:
            self._what()

    def epoch(self, course: tutti.Course, record: tutti.EpochRecord) -> None:
        if self._when == "epoch" and course.rank == 0 and record.epoch == 2:
            self._what()


def deadlock() -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("when", "rank", "options"),
    [
        ("begin", 1, {}),
        ("epoch", 0, {}),
        ("epoch", 0, {"strategy": "downpour", "servers": 1}),
    ],
)
def test_a_deadlock_outside_of_training_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], when: str, rank: int, options: dict[str, Any]
) -> None:
    with pytest.raises(PeerLost, match=f"lost rank {rank}: it did nothing at all for 5 s, and waited for no"):
        tutti.train(
            model(),
            workers=2,
            callbacks=Doing(deadlock, when),
            hang_timeout="0.5s",
            out=str(tmp_path / "run"),
            **{**OPTIONS, **options},
        )
    assert capfd.readouterr().err.count("in deadlock") == 1


def compute() -> None:
    until = time.monotonic() + 7
    while time.monotonic() < until:
        pass


def test_one_that_works_before_its_first_step_may_take_any_time() -> None:
    result = tutti.train(
        model(), workers=2, callbacks=Doing(compute, "begin"), hang_timeout="0.5s", **OPTIONS
    )
    assert len(result.history) == OPTIONS["epochs"]


class Ranks:
    """Two ranks that a `HangWatch` looks at, which are this process and know nothing of it."""

    def __init__(self) -> None:
        self.arena = Arena.create()
        assert self.arena.allocate(control_bytes(2)) == FIRST
        layout = ControlLayout(2)
        self.words, self.lines = self.arena.words(FIRST, layout.words), [layout.line(0), layout.line(1)]
        self.ranks = [RankProcess(rank, FileIO(os.devnull)) for rank in range(2)]
        self.watch = HangWatch(self.arena, self.ranks, timeout_s=60)

    def train(self, *steps: int) -> None:
        for line, made in zip(self.lines, steps, strict=True):
            self.words[line + BEAT] = 1 + made

    @property
    def hung(self) -> list[int]:
        return [one.rank for one in self.ranks if one.hung]


class Signs:
    """The signs of two ranks on other hosts, of which one is 3 s silent before it is known to be gone.

    Attributes:
        asked: the ranks that were asked for their stacks.
    """

    def __init__(self) -> None:
        self.left, self.asked = [0, 1], list[int]()
        self.address = LivenessAddress((), 0, "", 3)
        self.signs: dict[int, Sign] = {}
        self.watch = RemoteHangWatch(cast("LivenessWatch", self), timeout_s=20)

    def ask_for_stacks(self, rank: int) -> None:
        self.asked.append(rank)

    def train(self, seconds: int) -> None:
        for now in range(seconds):
            assert self.hung(now, (now, False), (now, False)) == []

    def hung(self, now: float, *courses: tuple[int, bool] | None) -> list[int]:
        for rank, course in enumerate(courses):
            if course is not None:
                self.signs[rank] = Sign(1 + course[0], course[1], now)
        return self.watch.look(now)[0]


def test_a_rank_of_another_host_that_is_stopped_is_lost_and_not_the_one_that_waits_for_it() -> None:
    two = Signs()
    two.train(10)
    for now in range(10, 29):
        assert two.hung(now, (10, True), None) == []
    assert two.hung(31, (10, True), None) == [1]
    assert two.asked == []


def test_a_rank_of_another_host_that_waits_for_nobody_hangs() -> None:
    two = Signs()
    two.train(10)
    for now in range(10, 30):
        assert two.hung(now, (10, True), (9, False)) == []
    assert two.hung(31, (10, True), (9, False)) == [1]
    assert two.asked == [1]


def test_who_waits_for_one_that_was_heard_of_later_does_not_hang() -> None:
    two = Signs()
    two.train(10)
    for now in range(10, 14):
        two.hung(now, (10, True), (now, False))
    for now in range(14, 33):
        assert two.hung(now, (10, True), (13, False)) == []
    assert two.hung(34, (10, True), (13, False)) == [1]


def test_nobody_of_other_hosts_hangs_while_the_launching_process_was_suspended() -> None:
    two = Signs()
    two.train(10)
    assert two.watch.look(1000) == ([], "")
    assert two.hung(1001, (10, False), (10, False)) == []


def test_a_host_that_may_be_cut_off_is_not_said_to_hang() -> None:
    two = Signs()
    two.address = replace(two.address, silence_s=30)
    two.train(10)
    for now in range(10, 40):
        assert two.hung(now, (10, True), None) == []


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.arena.close()
    for one in ranks.ranks:
        one.pipe.close()


def test_nobody_hangs_while_the_whole_job_was_suspended(two: Ranks) -> None:
    for second in range(10):
        two.train(second, second)
        two.watch.look(second)
    two.watch.look(1000)
    assert two.hung == []


def test_a_rank_that_was_stopped_is_lost_though_it_makes_no_steps_yet(two: Ranks) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            two.words[two.lines[1] + PID] = process.pid
            for second in range(1, 60, 4):
                two.watch.look(second)
            two.watch.look(100)  # As long as that the whole job was suspended.
            assert two.hung == []
            for second in range(101, 165, 4):
                two.watch.look(second)
            assert two.hung == [1]
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()


def test_a_long_step_is_ten_times_as_long_as_the_longest(two: Ranks) -> None:
    for second in range(0, 100, 10):
        two.train(second // 20, second // 20)
        for now in range(second, second + 10, 4):
            two.watch.look(now)
    for now in range(100, 270, 4):
        two.watch.look(now)
    assert two.hung == []


def test_the_time_between_two_looks_is_no_long_step(two: Ranks) -> None:
    watch = HangWatch(two.arena, two.ranks, timeout_s=5)
    for line in two.lines:
        # There are no such processes: none is sent a signal.
        two.words[line + PID] = 1 << 30
    for look in range(5):
        two.train(50 * look, 50 * look)
        watch.look(look)
    watch.look(8)
    assert two.hung == []
    watch.look(10)
    assert two.hung == [0, 1]


def test_whoever_has_made_a_step_between_two_looks_has_no_first_one_to_make(two: Ranks) -> None:
    watch = HangWatch(two.arena, two.ranks, timeout_s=5)
    for line in two.lines:
        two.words[line + PID] = 1 << 30  # There are no such processes.
    two.train(FIRST_STEP + 30, 30)
    for now in range(6):
        watch.look(now)
    assert two.hung == []
    watch.look(6)
    assert two.hung == [1]


def test_of_two_that_make_no_step_the_one_that_does_not_wait_hangs(two: Ranks) -> None:
    two.train(0, 0)
    two.watch.look(0)
    two.train(1, 1)
    two.words[two.lines[0] + WAITS] = 1
    # There are no such processes: none is sent a signal.
    for line in two.lines:
        two.words[line + PID] = 1 << 30
    for now in range(1, 70, 4):
        two.watch.look(now)
    assert two.hung == [1]


def test_of_two_that_wait_for_each_other_both_hang(two: Ranks) -> None:
    two.train(0, 0)
    two.watch.look(0)
    two.train(1, 1)
    for line in two.lines:
        two.words[line + WAITS] = 1
        two.words[line + PID] = 1 << 30
    for now in range(1, 70, 4):
        two.watch.look(now)
    assert two.hung == [0, 1]


def test_one_that_waits_for_another_that_is_not_due_yet_does_not_hang(two: Ranks) -> None:
    two.train(0, 0)
    two.watch.look(0)
    two.train(1, 1)
    two.watch.look(1)
    two.words[two.lines[0] + WAITS] = 1
    two.words[two.lines[1] + BEAT] = 0
    two.words[two.lines[1] + PID] = os.getpid()
    for now in range(2, 200, 4):
        two.watch.look(now)
    assert two.hung == []
