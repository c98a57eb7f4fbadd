"""The witness of a rank tells by what it has ended, and ends in the same way."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psutil
import pytest

from tutti.launch.liveness import DONE, LivenessConnection, LivenessWatch, first_lost
from tutti.launch.witness import be_witnessed

PROGRAM = """
import os, pickle, signal, sys, time
from tutti.launch.liveness import DONE, connect
from tutti.launch.orphans import end_at_once
from tutti.launch.witness import be_witnessed

connection = connect(pickle.loads(bytes.fromhex(sys.argv[1])), 0)
signal.signal(signal.SIGUSR1, lambda *_: print("asked", flush=True))
be_witnessed(connection, end_at_once)
print("works", os.getpid(), flush=True)
exec(sys.argv[2])
"""
ENDS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "aborted": ("os.abort()", -signal.SIGABRT),
    "interrupted": (
        "signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)",
        -signal.SIGINT,
    ),
    "exit at once": ("os._exit(3)", 3),
    "exit with 0": ("os._exit(0)", 0),
    "exception": ("sys.stderr.close(); raise ValueError", 1),
}


@contextmanager
def witnessed(watch: LivenessWatch, ends: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A rank that ends so: the process that was started, and that of the rank."""
    import pickle

    words = [sys.executable, "-c", PROGRAM, pickle.dumps(watch.address).hex(), ends]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            while not watch.complete:
                assert select.select([watch], [], [], 20)[0]
                watch.look()
            assert process.stdout is not None
            word, number = process.stdout.readline().split()
            assert word == "works"
            yield process, int(number)
        finally:
            process.kill()


def end_of_connection(watch: LivenessWatch) -> None:
    deadline = time.monotonic() + 20
    while not watch.ends:
        assert time.monotonic() < deadline
        select.select([watch], [], [], 1)
        watch.look()


@pytest.fixture
def watch() -> Iterator[LivenessWatch]:
    with closing(LivenessWatch(1, 30, elsewhere=False)) as made:
        yield made


@pytest.mark.parametrize("end", ENDS)
def test_it_tells_by_what_the_rank_has_ended_and_ends_so_too(end: str, watch: LivenessWatch) -> None:
    program, returncode = ENDS[end]
    with witnessed(watch, program) as (process, rank):
        assert rank != process.pid
        end_of_connection(watch)
        assert process.wait(20) == returncode
    (found,) = watch.ends
    assert (found.rank, found.silent, found.letter, found.returncode) == (0, False, b"", returncode)
    assert first_lost(watch.ends) == [0]


def test_what_the_rank_itself_has_said_counts_as_well(watch: LivenessWatch) -> None:
    with witnessed(watch, "connection.give_signs(lambda: (5, True), print); connection.leave(DONE)"):
        end_of_connection(watch)
    assert [(end.letter, end.returncode) for end in watch.ends] == [(DONE, 0)]
    assert first_lost(watch.ends) == []


def test_signals_are_the_rank_s(watch: LivenessWatch) -> None:
    with witnessed(watch, "time.sleep(1); os._exit(4)") as (process, _):
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        assert process.wait(20) == 4


def test_a_rank_ends_with_its_witness(watch: LivenessWatch) -> None:
    with witnessed(watch, "time.sleep(600)") as (process, number):
        rank = psutil.Process(number)
        process.kill()
        rank.wait(20)
        end_of_connection(watch)
    assert watch.ends[0].returncode is None


def test_its_word_ends_the_connection_even_if_a_process_of_the_rank_lives_on(watch: LivenessWatch) -> None:
    program = "os.fork() or time.sleep(60); os.kill(os.getpid(), signal.SIGKILL)"
    with witnessed(watch, program) as (process, _):
        end_of_connection(watch)
        os.killpg(process.pid, signal.SIGKILL)
    assert [end.returncode for end in watch.ends] == [-signal.SIGKILL]
    assert first_lost(watch.ends) == [0]


def test_without_room_for_a_process_the_rank_goes_on_without_one(
    watch: LivenessWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    before = signal.getsignal(signal.SIGUSR1)
    with closing(socket.socket()) as unconnected:
        monkeypatch.setattr(os, "fork", none_left)
        be_witnessed(LivenessConnection(unconnected), lambda: None)
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("works", [False, True])
def test_it_ends_the_rank_when_the_launching_process_is_gone(watch: LivenessWatch, works: bool) -> None:
    # A rank has the interpreter's lock while MPI starts.
    program = "import ctypes; ctypes.PyDLL(None).sleep(600)" if works else "time.sleep(600)"
    with witnessed(watch, program) as (process, number):
        rank = psutil.Process(number)
        assert process.poll() is None
        watch.close()
        assert process.wait(20) == -signal.SIGKILL
        rank.wait(20)
