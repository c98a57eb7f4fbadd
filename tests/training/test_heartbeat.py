"""The signs of life of a rank: that it leaves them, what they say, and that they never end a run."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tutti.comm.shm.communicator import HostCommunicator
from tutti.errors import NotFinite
from tutti.records.heartbeat import FAILED, TESTING, TRAINING, Heartbeat
from tutti.records.run import Evaluation
from tutti.records.run_folder import RunFolder
from tutti.records.texts import RunLength
from tutti.training import heartbeat as module
from tutti.training.heartbeat import HeartbeatThread
from tutti.training.progress import Moment

PATIENCE_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    return tmp_path


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs come every millisecond."""
    monkeypatch.setattr(module, "EVERY_S", 0.001)


def moment(epoch: int, step: int, samples: int) -> Moment:
    return Moment(epoch, step, Evaluation(samples, 0.5), 100.0)


def newest(run: Path) -> Heartbeat:
    (beat,) = RunFolder(run).heartbeats().records
    return beat


def wait_until(run: Path, state: str) -> Heartbeat:
    """The first sign that says so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        beats = RunFolder(run).heartbeats().records
        if beats and beats[0].state == state:
            return beats[0]
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("fast")
def test_a_sign_says_what_the_rank_does_and_how_far_it_is(run: Path) -> None:
    with HeartbeatThread(RunFolder(run), 1) as heart:
        heart.begin(RunLength(200, 50))
        heart.moment(moment(1, 20, 640))
        beat = wait_until(run, TRAINING)
        assert (beat.epoch, beat.step, beat.updates, beat.per_epoch) == (1, 20, 200, 50)
        assert beat.began is not None
        heart.doing(TESTING)
        assert wait_until(run, TESTING).step == 20


@pytest.mark.usefixtures("fast")
def test_a_sign_says_where_the_rank_waits_for_others(run: Path) -> None:
    """Whoever waits does so in a method of a communicator, which goes on once both signs have been seen."""
    comm = HostCommunicator.alone()
    with HeartbeatThread(RunFolder(run), 0):
        wait_until_it_waits(run, "")

        def until_seen() -> Generator[bool, None, None]:
            wait_until_it_waits(run, rf"_run \({__name__}:\d+\)")
            yield True

        comm._run(until_seen())
        wait_until_it_waits(run, "")
    comm.close()


def wait_until_it_waits(run: Path, where: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while [re.fullmatch(where, beat.waits) is None for beat in RunFolder(run).heartbeats().records] != [
        False
    ]:
        assert time.monotonic() < deadline


def test_the_last_sign_of_a_rank_that_fails_says_why(run: Path) -> None:
    with pytest.raises(NotFinite), HeartbeatThread(RunFolder(run), 1):
        raise NotFinite("the loss became nan in step 7\nlower the learning rate")
    beat = newest(run)
    assert (beat.state, beat.error) == (FAILED, "NotFinite: the loss became nan in step 7")


def test_rates_are_of_the_time_between_two_moments(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0, 109.0])
    with HeartbeatThread(RunFolder(run), 1) as heart:
        monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
        heart.begin(RunLength(200, 50))
        heart.moment(moment(1, 8, 160))
        assert (heart._beat.steps_per_s, heart._beat.samples_per_s) == (2.0, 40.0)
        heart.moment(moment(1, 28, 560))
        monkeypatch.undo()
    # The five seconds with four steps each have half the weight of ten.
    assert newest(run).steps_per_s == pytest.approx(3.0)
    assert newest(run).samples_per_s == pytest.approx(60.0)
