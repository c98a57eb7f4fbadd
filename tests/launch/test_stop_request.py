"""Requests to stop: which signal asks and which one ends, at every moment of a run, under every launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

import psutil
import pytest

from tests.launch.processes import left_in_shared_memory, shared_memory_files, wait_for_files, wait_until_gone
from tests.launch.test_mpirun import needs_mpirun
from tests.preloaded import interpreter
from tutti.errors import EXIT_INTERRUPTED
from tutti.launch import stop_request
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, StopRequests, stop_requested, stoppable

PROGRAM = Path(__file__).with_name("stopping.py")
PATIENCE_S = 90.0


@pytest.fixture
def stopping() -> Iterator[StopRequests]:
    with SignalWatch() as signals:
        found = StopRequests(signals, StopPage())
        found.page.stoppable = True
        yield found


class Clock:
    """The monotonic clock, which stands still between the signals of a test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


@pytest.mark.parametrize(
    ("before", "last", "ends"),
    [
        ([], SIGINT, False),
        ([], SIGTERM, False),
        ([], SIGUSR1, False),
        ([], SIGHUP, True),
        ([SIGINT], SIGINT, True),
        ([SIGINT], SIGTERM, True),
        ([SIGTERM], SIGTERM, True),
        ([SIGINT], SIGUSR1, False),
        ([SIGUSR1], SIGUSR1, False),
        ([SIGUSR1], SIGTERM, False),
        ([SIGUSR1, SIGTERM], SIGUSR1, False),
        ([SIGUSR1, SIGTERM], SIGTERM, True),
    ],
)
def test_a_signal_asks_or_ends(
    before: list[int], last: int, ends: bool, stopping: StopRequests, clock: Clock
) -> None:
    for signum in before:
        signal.raise_signal(signum)
        assert not stopping.over()
        clock.now_s += 1
    signal.raise_signal(last)
    assert stopping.over() == ends
    assert stopping.ended_by == (last if ends else None)
    assert stopping.page.requested == (last != SIGHUP)


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_signals_within_half_a_second_are_one_request(
    signum: int, stopping: StopRequests, clock: Clock
) -> None:
    for _ in range(2):  # As `timeout` sends them.
        signal.raise_signal(signum)
        assert not stopping.over()
        clock.now_s += 0.001
    signal.raise_signal(signum)
    stopping.act()
    assert not stopping.over()
    clock.now_s += 0.5
    signal.raise_signal(signum)
    assert stopping.over()


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM, SIGUSR1])
def test_outside_a_stoppable_section_the_first_signal_ends(signum: int, stopping: StopRequests) -> None:
    stopping.page.stoppable = False
    signal.raise_signal(signum)
    assert stopping.over()
    assert not stopping.page.requested
    with pytest.raises(KeyboardInterrupt if signum == SIGINT else SystemExit):
        _act_outside(stopping)


def _act_outside(stopping: StopRequests) -> None:
    for signum in stop_request.ASKING:
        signal.signal(signum, signal.default_int_handler if signum == SIGINT else signal.SIG_DFL)
    stopping.act()


def test_a_request_is_announced_once_and_passed_on(
    stopping: StopRequests, capfd: pytest.CaptureFixture[str]
) -> None:
    passed: list[int] = []
    stopping.page.on_request = lambda: passed.append(1)
    for signum in (SIGUSR1, SIGTERM, SIGUSR1):
        signal.raise_signal(signum)
        assert not stopping.over()
    assert capfd.readouterr().err == "tutti: saving, then stopping\n"
    assert passed == [1, 1]
    stopping.act()


def test_new_ranks_get_an_earlier_request(stopping: StopRequests) -> None:
    signal.raise_signal(SIGTERM)
    assert not stopping.over()
    passed: list[int] = []
    page = StopPage()
    page.on_request = lambda: passed.append(1)
    stopping.pass_to(page)
    assert page.requested
    assert passed == [1]
    stopping.act()


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in stop_request.ASKING}
    signal.signal(SIGINT, signal.default_int_handler)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("_handlers")
def test_in_this_process_the_first_ctrl_c_asks_and_a_later_one_interrupts(
    capfd: pytest.CaptureFixture[str], clock: Clock
) -> None:
    for others in (nullcontext(), stoppable()):  # Virtual ranks are in the section together.
        with stoppable(), others:
            assert not stop_requested(), "of an earlier section"
            signal.raise_signal(SIGINT)
            assert stop_requested()
            signal.raise_signal(SIGUSR1)
            signal.raise_signal(SIGINT)
            clock.now_s += 0.5
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(SIGINT)
        assert capfd.readouterr().err == "tutti: saving, then stopping; Ctrl-C again ends at once\n"
        assert stop_requested(), "whoever has left the section may still ask"
        assert signal.getsignal(SIGINT) is signal.default_int_handler
        assert signal.getsignal(SIGTERM) == signal.getsignal(SIGUSR1) == signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(SIGINT)


@pytest.mark.usefixtures("_handlers")
def test_a_program_keeps_its_own_sigusr1_and_its_sigterm_is_called_at_the_end(clock: Clock) -> None:
    came: list[int] = []
    signal.signal(SIGUSR1, lambda signum, frame: came.append(signum))
    signal.signal(SIGTERM, lambda signum, frame: came.append(signum))
    with stoppable():
        signal.raise_signal(SIGUSR1)
        assert not stop_requested()
        signal.raise_signal(SIGTERM)
        assert (stop_requested(), came) == (True, [SIGUSR1])
        clock.now_s += 0.5
        signal.raise_signal(SIGTERM)
        assert came == [SIGUSR1, SIGTERM]


@pytest.mark.usefixtures("_handlers")
def test_a_rank_of_the_users_launcher_notes_a_request_before_its_first_section() -> None:
    signal.signal(SIGUSR1, signal.SIG_DFL)
    stop_request.note_early()
    signal.raise_signal(SIGUSR1)
    for requested in (True, False):
        with stoppable():
            assert stop_requested() is requested


@dataclass
class Job:
    """A run of `stopping.py`."""

    folder: Path
    where: str
    ranks: int = 2
    options: Sequence[str] = ()
    forked: bool = False  # with torch imported

    def start(self) -> None:
        self.folder.mkdir()
        python = interpreter(starts_ranks=True) if self.forked else [sys.executable]
        with (self.folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [*python, PROGRAM, self.folder, self.where, *self.options],
                stdout=stderr,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                # What Ctrl-C reaches, as in a terminal.
                start_new_session=True,
            )

    def wait_for(self, moment: str) -> None:
        wait_for_files(self.folder / f"{moment}-{rank}" for rank in range(self.ranks))

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        found = {own, *own.children(recursive=True)}
        if self.forked:
            for path in (*self.folder.glob("program"), *self.folder.glob("loading-?")):
                # It may just begin, or be about to end.
                with suppress(ValueError, psutil.NoSuchProcess):
                    forked = psutil.Process(int(path.read_text()))
                    found |= {forked, *forked.children(recursive=True)}
        return [own, *found - {own}]

    def press_ctrl_c(self) -> None:
        """Send SIGINT to all that a terminal sends it to."""
        os.killpg(int((self.folder / "program").read_text()), SIGINT)

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def saved(self) -> bool:
        """Whether all ranks have saved; it is all or none, unless the run was ended at once."""
        return all((self.folder / f"saved-{rank}").exists() for rank in range(self.ranks))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def running() -> Iterator[list[Job]]:
    """Jobs, to be started together, as most of the time goes into starting; they leave nothing behind."""
    jobs: list[Job] = []
    before = shared_memory_files()
    yield jobs
    for job in jobs:
        job.close()
    assert left_in_shared_memory(before) == set()


def test_a_signal_that_ends_counts_behind_a_request_that_comes_too_late(stopping: StopRequests) -> None:
    for signum in (SIGUSR1, SIGHUP):
        os.kill(os.getpid(), signum)
    with pytest.raises(SystemExit):
        stopping.act()


def end_with(job: Job, *acts: int | str) -> int:
    """Send signals, or wait for moments, in turn; return the exit code, once nothing of the job is left."""
    family = job.family()
    for act in acts:
        if isinstance(act, str) and act != "Ctrl-C":
            job.wait_for(act)
            time.sleep(stop_request.SAME_S)
        elif act == "Ctrl-C":
            job.press_ctrl_c()
        else:
            job.process.send_signal(act)
    code = job.process.wait(timeout=PATIENCE_S)
    assert wait_until_gone(one.pid for one in family) == []
    return code


def test_ranks_under_our_supervisor_save_and_stop_or_are_ended(tmp_path: Path, running: list[Job]) -> None:
    cases: dict[str, tuple[str, str, list[int | str], int, bool]] = {
        "Ctrl-C": ("training", "training", ["Ctrl-C"], EXIT_INTERRUPTED, True),
        "loading": ("loading", "loading", [SIGTERM], 128 + SIGTERM, False),
        "twice": ("saving", "training", ["Ctrl-C", "saving", "Ctrl-C"], -SIGINT, False),
        "late": ("saving", "training", [SIGUSR1, "saving", SIGUSR1, SIGHUP], 128 + SIGHUP, False),
    }
    for name, (where, *_) in cases.items():
        running.append(Job(tmp_path / name, where, forked=True))
        running[-1].start()
    for job, (_, moment, acts, code, saved) in zip(running, cases.values(), strict=True):
        job.wait_for(moment)
        assert end_with(job, *acts) == code, job.folder.name
        assert job.saved == saved, job.folder.name
        asked = moment == "training"
        assert job.said.count("tutti: saving, then stopping") == asked


@needs_mpirun
@pytest.mark.mpi
def test_ranks_under_our_mpirun_save_and_stop_or_are_ended(tmp_path: Path, running: list[Job]) -> None:
    cases: list[tuple[str, str, list[int | str], int, bool]] = [
        ("training", "training", ["Ctrl-C"], EXIT_INTERRUPTED, True),
        ("training", "training", [SIGTERM], EXIT_INTERRUPTED, True),
        ("loading", "loading", [SIGUSR1], 128 + SIGUSR1, False),
        ("saving", "training", [SIGTERM, "saving", SIGTERM], 128 + SIGTERM, False),
    ]
    for number, (where, *_) in enumerate(cases):
        running.append(Job(tmp_path / str(number), where, options=["localhost:2"], forked=True))
        running[-1].start()
    for job, (_, moment, acts, code, saved) in zip(running, cases, strict=True):
        job.wait_for(moment)
        segments = segments_of(job)
        assert end_with(job, *acts) == code
        assert job.saved == saved
        assert [path for path in segments if path.exists()] == []


def segments_of(job: Job) -> list[Path]:
    """The files that MPI has made for the ranks."""
    files = {
        Path(line.split()[-1])
        for one in job.family()
        for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()
        if "/dev/shm/sm_segment" in line
    }
    assert files
    return list(files)
