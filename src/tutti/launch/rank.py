"""What a process that the fork server has forked does: join the others, run the entry, report."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from tutti.launch import surroundings
from tutti.launch.allocator import keep_memory
from tutti.launch.entry import load_entry
from tutti.launch.fork_server import Descriptors, Start
from tutti.launch.reports import Report, failure, without_launcher
from tutti.output import lasting_output


@dataclass(frozen=True)
class Job:
    """What all ranks are to do, and in which circumstances.

    Attributes:
        payload: handed to the entry.
        path: `sys.path` of the supervisor.
        arguments: `sys.argv` of the supervisor.
        folder: the supervisor's working directory; nothing if there is none any more.
    """

    payload: bytes
    path: list[str]
    arguments: list[str]
    folder: str


def run(start: Start, files: Descriptors) -> None:
    """Be a rank, from the fork to the report."""
    with lasting_output():
        try:
            job = _settle_in(start, files)
            report = _run(start, job, files.arena)
        except BaseException as error:
            _fail(start.rank, files.reports, error, without_launcher(error.__traceback__))
        _send(files.reports, report)


def _settle_in(start: Start, files: Descriptors) -> Job:
    """Output, memory, cores, circumstances: all that needs no other rank."""
    import numpy as np

    for stream, descriptor, given in ((sys.stdout, 1, files.output), (sys.stderr, 2, files.errors)):
        os.dup2(given, descriptor)
        os.close(given)
        # What a rank prints must be seen even if it is killed before its buffer is full.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    job: Job = pickle.loads(_read(files.job))
    os.close(files.job)
    keep_memory()
    os.sched_setaffinity(0, start.cores)
    faulthandler.enable()
    # The fork server's would be the same in all ranks.
    np.random.seed()
    with suppress(FileNotFoundError):
        os.chdir(job.folder)
    sys.path[:], sys.argv[:] = job.path, job.arguments
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(start.threads)
    surroundings.become_rank(start.rank, start.size)
    return job


def _run(start: Start, job: Job, arena: int) -> Report:
    """Join the other ranks and run the entry."""
    import torch

    from tutti.comm.arena import Arena
    from tutti.comm.host import HostCommunicator
    from tutti.launch.join import adopt

    torch.set_num_threads(start.threads)
    comm = HostCommunicator(Arena.attach(arena), start.block, start.rank, start.size)
    adopt(comm)
    value = load_entry(start.entry)(comm, job.payload)
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


def _fail(rank: int, reports: int, error: BaseException, frames: TracebackType | None) -> None:
    """Report the exception and be gone at once: the peers notice, the supervisor ends them."""
    # After another rank's failure nobody may be there to read this one.
    with suppress(BrokenPipeError):
        _send(reports, failure(rank, error, frames))
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(1)


def _send(descriptor: int, report: Report) -> None:
    data = memoryview(report.encoded())
    while data:
        data = data[os.write(descriptor, data) :]
