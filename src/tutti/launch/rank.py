"""What a process that the supervisor starts does: join the others, run the entry, report.

torch is imported late, when the process is on its leash, on its cores, and knows its number of threads.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Final

from tutti.launch import surroundings
from tutti.launch.allocator import keep_memory
from tutti.launch.entry import load_entry
from tutti.launch.leash import die_with_parent
from tutti.launch.reports import Report, failure, without_launcher

START: Final = "TUTTI_START"
"""The environment variable that holds a rank's `Start`; taken out of the environment first of all."""

BOOT: Final = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ['{START}'])['path']; "
    "from tutti.launch.rank import main; main()"
)
"""The program that a rank runs: with the supervisor's search path it finds the same modules."""


@dataclass(frozen=True)
class Start:
    """What a rank must know.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        entry: the function to run, as "package.module:function".
        supervisor: the process that started it.
        memory: the descriptor of the host's arena.
        block: where the control block of the world lies in the arena.
        payload: the descriptor of the file with the entry's payload.
        reports: the descriptor of the pipe for the report.
        threads: how many threads torch may use.
        cores: the logical CPUs to be bound to; empty: not bound.
        path: `sys.path` of the supervisor.
        arguments: `sys.argv` of the supervisor.
    """

    rank: int
    size: int
    entry: str
    supervisor: int
    memory: int
    block: int
    payload: int
    reports: int
    threads: int
    cores: tuple[int, ...]
    path: list[str]
    arguments: list[str]

    def as_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


def main() -> None:
    """Be a rank, as the environment says."""
    start = Start(**json.loads(os.environ.pop(START)))
    _settle_in(start)
    try:
        report = _run(start)
    except BaseException as error:
        _fail(start, error, without_launcher(error.__traceback__))
    _send(start.reports, report)


def _settle_in(start: Start) -> None:
    """Leash, signals, cores, memory: all that needs no torch."""
    die_with_parent(start.supervisor)
    keep_memory()
    # Ctrl-C reaches the whole foreground group; what it means is for the supervisor to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for descriptor in (start.memory, start.payload, start.reports):
        os.set_inheritable(descriptor, False)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    faulthandler.enable()
    # What a rank prints must be seen even if it is killed before its buffer is full.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    sys.argv[:] = start.arguments
    surroundings.become_rank(start.rank, start.size)


def _run(start: Start) -> Report:
    """Join the other ranks and run the entry."""
    import torch

    from tutti.comm.arena import Arena
    from tutti.comm.host import HostCommunicator
    from tutti.launch.join import adopt

    torch.set_num_threads(start.threads)
    comm = HostCommunicator(Arena.attach(start.memory), start.block, start.rank, start.size)
    adopt(comm)
    value = load_entry(start.entry)(comm, _read(start.payload))
    comm.close()
    return done(start.rank, value)


def done(rank: int, value: object) -> Report:
    """The report of a rank that is done; rank 0's return value is the job's."""
    import cloudpickle

    pickled: bytes | None = cloudpickle.dumps(value) if rank == 0 else None
    return Report(rank, time.monotonic(), pickled)


def _read(descriptor: int) -> bytes:
    """The whole file, without moving the position that all ranks share."""
    size = os.fstat(descriptor).st_size
    data = bytearray()
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    return bytes(data)


def _fail(start: Start, error: BaseException, frames: TracebackType | None) -> None:
    """Report the exception and be gone at once: the peers notice, the supervisor ends them."""
    _send(start.reports, failure(start.rank, error, frames))
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(1)


def _send(descriptor: int, report: Report) -> None:
    data = memoryview(report.encoded())
    while data:
        data = data[os.write(descriptor, data) :]
