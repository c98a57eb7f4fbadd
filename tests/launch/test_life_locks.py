"""Whoever waits for the end of a process by its lock is told as soon as it begins, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NoReturn

import pytest

from tutti.comm.shm.arena import Arena
from tutti.errors import PeerLost
from tutti.launch.life_locks import BYTES, LifeLock, LifeWatch
from tutti.launch.placement import Placement
from tutti.launch.start import start

HOLDER = """
import gc, os, sys, threading
from tutti.comm.shm.arena import Arena
from tutti.launch.life_locks import LifeLock

LifeLock(Arena.attach(int(sys.argv[1])), int(sys.argv[2])).hold()
gc.collect()
# Others of its threads and processes end before it.
thread = threading.Thread(target=print)
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print("holds", flush=True)
sys.stdin.readline()
exec(sys.argv[3])
"""
ENDS = {
    "killed": "os.kill(os.getpid(), 9)",
    "exit at once": "os._exit(3)",
    "end": "",
    "crash": "import faulthandler; faulthandler._sigsegv()",
    "another program": "os.execv('/bin/true', ['true'])",
}


@pytest.fixture
def lock() -> Iterator[tuple[Arena, int, LifeLock]]:
    with closing(Arena.create()) as arena:
        offset = arena.allocate(BYTES)
        yield arena, offset, LifeLock.make(arena, offset)


def is_told(watch: LifeWatch, seconds: float) -> bool:
    return bool(select.select([watch], [], [], seconds)[0])


@contextmanager
def holding(lock: tuple[Arena, int, LifeLock], end: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes the lock, and ends so once it is sent a line."""
    arena, offset, _ = lock
    words = [sys.executable, "-c", HOLDER, str(arena.fd), str(offset), end]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[arena.fd], bufsize=0
    ) as process:
        yield process


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_process_is_told_however_it_ends(end: str, lock: tuple[Arena, int, LifeLock]) -> None:
    with holding(lock, ENDS[end]) as process, closing(LifeWatch([lock[2]])) as watch:
        assert process.stdout is not None
        assert process.stdin is not None
        watch.look()
        while (line := process.stdout.readline()) != b"holds\n":
            assert line, "it has ended"
        watch.look()
        assert watch.waits_for_all
        assert not is_told(watch, 0.2), "it lives"
        process.stdin.write(b"\n")
        assert is_told(watch, 30.0)
        watch.clear()
        assert not is_told(watch, 0.0), "told once"


def test_nobody_waits_for_a_lock_that_nobody_has_taken(lock: tuple[Arena, int, LifeLock]) -> None:
    with closing(LifeWatch([lock[2]])) as watch:
        watch.look()
        assert not watch.waits_for_all
        assert not is_told(watch, 0.1)


def test_without_threads_or_descriptors_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, lock: tuple[Arena, int, LifeLock]
) -> None:
    def none_left(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    lock[2].hold()
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched, closing(LifeWatch([lock[2]])) as watch:
        patched.setattr(threading.Thread, "start", none_left)
        watch.look()
        assert watch.waits_for_all
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.serial
def test_it_is_told_before_the_memory_of_the_process_is_given_back() -> None:
    much = "x = bytearray(1 << 30); x[::4096] = bytes([1]) * len(x[::4096]); os.kill(os.getpid(), 9)"

    def is_told_first() -> bool:
        with closing(Arena.create()) as arena:
            offset = arena.allocate(BYTES)
            lock = LifeLock.make(arena, offset)
            with holding((arena, offset, lock), much) as process, closing(LifeWatch([lock])) as watch:
                assert process.stdin is not None
                while not lock.is_held:
                    time.sleep(0.01)
                watch.look()
                process.stdin.write(b"\n")
                assert is_told(watch, 60.0)
                first = process.poll() is None  # Its parent is not told yet.
                assert process.wait() == -signal.SIGKILL
        return first

    # Whoever is told may have to wait for a core. By the parent it would never be so.
    assert any(is_told_first() for _ in range(5))


def test_a_lost_rank_is_known_of_while_the_process_that_forked_it_is_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0.*SIGKILL"):
        start("tests.launch.entries:die_unseen", b"", Placement(2, 1))
    assert time.monotonic() - began < 60
