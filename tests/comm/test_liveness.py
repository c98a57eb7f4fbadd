"""Waiting for other processes, and noticing that they ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tutti.comm.shm.arena import Arena
from tutti.comm.shm.layout import LEFT, HostGroup, control_bytes
from tutti.comm.shm.liveness import Peers, ProcessWatch, wait
from tutti.errors import PeerLost

pytestmark = pytest.mark.timeout(30)
SOON_S = 30.0


@pytest.fixture
def watch() -> Iterator[ProcessWatch]:
    watch = ProcessWatch()
    yield watch
    watch.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input is closed, or it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close()


@pytest.fixture
def alone(arena: Arena) -> Iterator[Peers]:
    peers = Peers(group_of(arena, 1), 1.0, cores=1)
    yield peers
    peers.close()


def group_of(arena: Arena, size: int) -> HostGroup:
    """Rank 0 of a group; rank r is rank 7 + r of the job."""
    return HostGroup(arena, arena.allocate(control_bytes(size)), 0, range(7, 7 + size))


def leave(group: HostGroup, rank: int) -> None:
    group.words[group.layout.line(rank) + LEFT] = 1


def ended_in_time(watch: ProcessWatch) -> list[int]:
    deadline = time.monotonic() + SOON_S
    while not (ended := watch.ended(0.01)):
        assert time.monotonic() < deadline
    return ended


def test_a_killed_process_without_a_wait_has_ended(
    watch: ProcessWatch, process: subprocess.Popen[bytes]
) -> None:
    watch.add(1, os.getpid())
    watch.add(2, process.pid)
    process.kill()
    assert ended_in_time(watch) == [2]


def test_a_process_that_was_gone_before_has_ended(
    watch: ProcessWatch, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    process.wait()
    watch.add(3, process.pid)
    assert ended_in_time(watch) == [3]


def test_waiting_continues_while_one_rank_is_there(arena: Arena, alone: Peers) -> None:
    group = group_of(arena, 3)
    leave(group, 1)
    ready_at = time.monotonic() + 0.1
    wait(lambda: time.monotonic() > ready_at, alone, group, lambda: [1, 2])
    leave(group, 2)
    with pytest.raises(PeerLost, match="lost ranks 8, 9: it left") as lost:
        wait(lambda: False, alone, group, lambda: [1, 2])
    assert lost.value.ranks == [8, 9]


def test_work_of_a_rank_before_it_left_counts(
    arena: Arena, alone: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(arena, 2)
    leave(group, 1)
    done: list[bool] = []
    # It becomes ready just while the look at who is still there is taken.
    monkeypatch.setattr(alone, "check", lambda: done.append(True))
    wait(lambda: bool(done), alone, group, lambda: [1])
    assert done == [True]
