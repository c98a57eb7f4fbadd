"""The main function of a forked rank: join the others, run the entry, report."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from tutti.launch import launcher
from tutti.launch.cores import leave_binding_to_tutti
from tutti.launch.exit_reports import done, failure, without_launcher
from tutti.launch.runtime_settings import keep_memory
from tutti.launch.stop_request import StopPage, be_supervised
from tutti.terminal import lasting_output, say_last

if TYPE_CHECKING:
    from tutti.comm.base import Communicator


class RankSetting(NamedTuple):
    """The setting of one rank."""

    threads: int
    cores: tuple[int, ...]  # logical CPUs
    channel: int | None = None  # descriptor of a connection to the process that starts it


@dataclass(frozen=True)
class RankPlace:
    """Fork a rank with this place in the job. Its descriptors are sent with it."""

    rank: int
    size: int
    entry: str
    block: int
    setting: RankSetting


class Descriptors(NamedTuple):
    """The open files that a rank gets."""

    arena: int
    job: int
    reports: int
    stop: int
    output: int
    errors: int
    channel: int | None = None


@dataclass(frozen=True)
class RankJob:
    """The job of all ranks, and the supervisor's circumstances."""

    payload: bytes
    path: list[str]
    arguments: list[str]
    folder: str
    environment: dict[str, str]


_channel: Connection | None = None


def channel() -> Connection:
    """Return the connection of this rank to the process that started it."""
    assert _channel is not None, "this rank was given none"
    return _channel


def run(start: RankPlace, files: Descriptors) -> None:
    """Be a rank, from the fork to the report."""
    own = os.getpid()
    with lasting_output():
        try:
            job = _set_up_process(start, files)
            comm = _join(start, files.arena)
            value = resolve_name(start.entry)(comm, job.payload)
            if os.getpid() != own:
                # A process that the program has forked: it may end, but not in the rank's name.
                return
            comm.close()
            report = done(start.rank, value)
        except BaseException as error:
            if os.getpid() != own:
                raise
            report = failure(start.rank, error, without_launcher(error.__traceback__))
        with suppress(BrokenPipeError):  # After another rank's failure the reader may be gone.
            Connection(files.reports, readable=False).send(report)
        if report.failed:  # Be gone at once: the peers notice, the supervisor ends them.
            say_last("")
            os._exit(1)


def _set_up_process(start: RankPlace, files: Descriptors) -> RankJob:
    """Set up output, memory, cores and paths."""
    import numpy as np

    launcher.become_rank(start.rank, start.size)
    # The fork server ignores it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    be_supervised(StopPage(files.stop))
    os.close(files.stop)
    if files.channel is not None:
        global _channel
        _channel = Connection(files.channel)
    for stream, descriptor, given in ((sys.stdout, 1, files.output), (sys.stderr, 2, files.errors)):
        os.dup2(given, descriptor)
        os.close(given)
        # What a rank prints must be seen even if it is killed before its buffer is full.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    # Opened again, as all ranks share the position of the descriptor.
    job: RankJob = pickle.loads(Path(f"/proc/self/fd/{files.job}").read_bytes())
    os.close(files.job)
    keep_memory()
    os.sched_setaffinity(0, start.setting.cores)
    faulthandler.enable()
    # The fork server's would be the same in all ranks.
    np.random.seed()
    os.chdir(job.folder)
    sys.path[:], sys.argv[:] = job.path, job.arguments
    os.environ.clear()
    os.environ.update(job.environment)
    leave_binding_to_tutti()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(start.setting.threads)
    return job


def _join(start: RankPlace, arena: int) -> Communicator:
    """Join the other ranks."""
    import torch

    from tutti.comm.shm.arena import Arena
    from tutti.comm.shm.communicator import HostCommunicator
    from tutti.comm.shm.layout import HostGroup
    from tutti.launch.busy_cores import CoreWatch
    from tutti.launch.world import adopt

    torch.set_num_threads(start.setting.threads)
    CoreWatch(start.setting.threads)
    comm = HostCommunicator(HostGroup(Arena.attach(arena), start.block, start.rank, range(start.size)))
    adopt(comm)
    return comm
