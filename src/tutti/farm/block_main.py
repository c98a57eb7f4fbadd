"""The ranks of a block: take a job, train, report its end, take the next one. Runs on every rank.

    coordinator ──TrainTask──► rank 0 ──broadcast──► all ranks of the block: `run.train.train`
                ◄─EpochOver──          on a communicator of the job's own
                ◄─JobOver────

A job that fails ends these ranks, with its exception as their report, and fresh ones take over within
milliseconds. The same happens after a job with the user's own code, to undo its changes.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, cast

from tutti.comm.base import Communicator
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.layout import HostGroup, control_bytes
from tutti.comm.shm.memfd import FileAddress
from tutti.farm.coordinator import BlockReady, EpochOver, JobOver, TrainTask
from tutti.launch.rank_main import channel as own_channel
from tutti.launch.world import adopt
from tutti.records.run import EpochRecord
from tutti.run.shared_data import SharedData
from tutti.run.train import RunContext, train
from tutti.training.progress import Progress

PRUNED: Final = "a comparison with other runs has ended it"
"""Why a run ends early that was not promising."""


def work(comm: Communicator, payload: bytes) -> None:
    """Work on one job after the other until there is none (entry point of the ranks)."""
    # Looking through these objects for garbage after each job would take longer than short jobs.
    gc.collect()
    gc.freeze()
    channel = own_channel() if comm.rank == 0 else None
    data = SharedData(pickle.loads(payload))
    if channel is not None:
        channel.send(BlockReady())
    while (task := _next(comm, channel)) is not None:
        done = _work_on(comm, task, data, channel)
        # The coordinator may end these ranks then.
        comm.barrier()
        if channel is not None:
            channel.send(done)


def _next(comm: Communicator, channel: Connection | None) -> TrainTask | None:
    """Return the next task, the same on all ranks; None: there is none."""
    task: object = None
    if channel is not None:
        try:
            task = channel.recv()
            while isinstance(task, bool):
                # The answer to the last epoch, which no run waits for.
                task = channel.recv()
        except EOFError:
            task = None
    return cast("TrainTask | None", comm.broadcast_object(task))


def _work_on(comm: Communicator, task: TrainTask, data: SharedData, channel: Connection | None) -> JobOver:
    reporter = _Reporter(channel, task.block)
    context = RunContext(reporter, data.open, reporter.ends if task.asks else None, alone=False)
    # Besides filters this puts back which warnings have been shown: each job shows its own.
    with _printed_to(task.log), warnings.catch_warnings(), _communicator(comm) as ranks:
        outcome = train(ranks, task.job, context)
    # A model and its optimizer are freed only now where they refer to each other.
    gc.collect()
    return JobOver(task.block, outcome.summary, outcome.stopped or "")


@contextmanager
def _communicator(comm: Communicator) -> Iterator[Communicator]:
    """Yield a communicator of the block's ranks for one job, whose memory is released afterwards."""
    arena, place = None, None
    if comm.rank == 0:
        arena = Arena.create()
        place = arena.address, arena.allocate(control_bytes(comm.size))
    address, block = cast("tuple[FileAddress, int]", comm.broadcast_object(place))
    arena = arena or Arena.open(address)
    ranks = HostCommunicator(HostGroup(arena, block, comm.rank, range(comm.size)))
    adopt(ranks)
    yield ranks
    ranks.close()
    # No rank reads or writes it from here on.
    comm.barrier()
    if comm.rank == 0:
        arena.release_from()
    arena.close()
    adopt(comm)


@contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    """Append this process's output, including its threads' and children's, to a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        _flush()
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        yield
    finally:
        _flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        os.close(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A job may have closed it, or put another one there.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


class _Reporter(Progress):
    """Reports each epoch to the coordinator from rank 0, and receives whether it is the last one."""

    def __init__(self, channel: Connection | None, block: int) -> None:
        self._channel, self._block = channel, block
        self._unanswered = 0

    def epoch(self, record: EpochRecord) -> None:
        """Send the record."""
        if self._channel is not None:
            self._channel.send(EpochOver(self._block, record))
            self._unanswered += 1

    def ends(self, comm: Communicator) -> str | None:
        """Return why the run ends with the reported epochs, or None (collective)."""
        told = False
        if self._channel is not None:
            for _ in range(self._unanswered):
                told |= cast("bool", self._channel.recv())
            self._unanswered = 0
        return PRUNED if comm.broadcast_object(told) else None
