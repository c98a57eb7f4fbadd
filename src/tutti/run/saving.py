"""The files of a run while it trains: checkpoints, heartbeats, usage, and a trace. Runs on every rank."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, cast

from tutti.checkpoint.memory_files import MemoryPlace
from tutti.checkpoint.saver import MemorySaver, Saver
from tutti.comm.base import Communicator
from tutti.comm.traced import TracedCommunicator, compare_clocks
from tutti.launch.stop_request import stop_requested
from tutti.launch.usage_sampler import Sampler
from tutti.records import checkpoints
from tutti.records.json_lines import Json, parse_record
from tutti.records.run import EpochRecord
from tutti.records.run_folder import CONFIG, RunFolder
from tutti.records.trace import ClockReading, Lane, Trace
from tutti.run.build import Assembly
from tutti.run.restore import facts_of
from tutti.state import State
from tutti.strategies.base import Pace
from tutti.terminal import warn_on_stderr
from tutti.training.agenda import Agenda, Decision, Wishes
from tutti.training.heartbeat import HeartbeatThread
from tutti.training.intervals import AUTO, Every
from tutti.training.progress import Progress

ASKED: Final = "it was asked to"
"""Why a run stops on a signal."""


@dataclass
class Saving:
    """The checkpoints of one run, as one of its ranks sees them (collective over the workers)."""

    _comm: Communicator
    _parts: Assembly
    _disk: Saver | None
    _memory: MemorySaver | None
    agenda: Agenda  # the times at which this run is saved, or stops
    lost: bool = False  # the state with which the run was to stop could not be written
    step: int | None = None  # the updates that were made when the state was last saved

    @cached_property
    def _facts(self) -> Json:
        """Identity of model and data; computed when first needed, as reading the data takes time."""
        return facts_of(self._parts.config, self._parts.task.dataset) if self._comm.rank == 0 else {}

    def save(self, step: int, state: State, decision: Decision) -> None:
        """Keep this rank's state; a final one is on the disk when this returns."""
        if self._memory is not None and decision.copy:
            self._memory.save(step, self._parts.portion.to_save(state), self._facts)
        if self._disk is None or not decision.save:
            return
        history = state.shared["training"]["history"]
        last = parse_record(history[-1], EpochRecord) if history else None
        score = None if last is None else self._parts.ending.monitor.score(last)
        self.step = step
        self._disk.save(step, self._parts.portion.to_save(state), self._facts, score, wait=decision.final)
        if decision.final:
            self.lost = cast("bool", self._comm.broadcast_object(self._disk.last != step))


@contextmanager
def saving(
    comm: Communicator,
    parts: Assembly,
    folder: RunFolder | None,  # on rank 0
    memory: MemoryPlace | None,  # where the state is copied to
    deadline: float | None,  # when the run is to stop, in seconds since the epoch
    *,
    write: bool,  # the run has a folder
    resumed: bool,  # the user has resumed an earlier run, whose end is saved
) -> Iterator[Saving | None]:
    """Yield the object that saves a run (collective over the workers); None if nothing is to be saved."""
    if not write and memory is None:
        yield None
        return
    config, strategy, disk, first = parts.config, parts.strategy, None, comm.rank == 0
    # Rank 0 decides; other hosts cannot read the memory.
    copies = None if memory is None else memory.copy_wish() if first else lambda: False
    wishes = Wishes(copies=copies, free=strategy.pace is Pace.FREE, period=strategy.period)

    def stop() -> str | None:
        if first and is_over(deadline):
            return f"its time limit of {config.time_limit} is over"
        return ASKED if stop_requested() else None

    with ExitStack() as stack:
        if write:
            place = Path() if folder is None else folder.path.absolute() / checkpoints.FOLDER
            if folder is not None:
                stack.callback(_remove_empty, place)
            disk = stack.enter_context(Saver(comm, place, config.keep))
            every = Every.parse(config.checkpoint, "--checkpoint")
            wishes = replace(wishes, every=every, end=config.checkpoint != AUTO or resumed, stop=stop)
        copier = None if memory is None else stack.enter_context(closing(MemorySaver(comm, memory)))
        yield Saving(comm, parts, disk, copier, Agenda(comm, wishes))


def is_over(deadline: float | None) -> bool:
    """Return whether a run's time is over."""
    return deadline is not None and time.time() >= deadline


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # There are checkpoints in it.
        folder.rmdir()


@contextmanager
def observed(
    comm: Communicator, folder: RunFolder | None, sampler: Sampler | None, wanted: bool
) -> Iterator[Progress]:
    """Sample cores and memory into the run folder, and yield its writer of heartbeats (collective)."""
    seen = _seen(comm, folder) if wanted else None
    host = socket.gethostname()
    first = comm.broadcast_object(host) if wanted else None
    if sampler is not None and seen is not None:
        sampler.begin(seen.usage_file(None if host == first else host))
    with nullcontext(Progress()) if seen is None else HeartbeatThread(seen, comm.rank) as heart:
        yield heart


def _seen(comm: Communicator, folder: RunFolder | None) -> RunFolder | None:
    """Return the run folder as this rank sees it, or None (collective)."""
    given = comm.broadcast_object(None if folder is None else str(folder.path.absolute()))
    seen = RunFolder(Path(cast("str", given)))
    return seen if seen.has(CONFIG) else None


class Recording:
    """One rank's recordings (collective over all ranks of the job, servers included)."""

    def __init__(self, comm: Communicator, traces: bool) -> None:
        self._all = comm
        self.trace = Trace() if traces else None
        self._readings: list[ClockReading] = []
        self.comm = comm  # the same ranks, with recorded operations
        if self.trace is not None:
            self._read_clock()
            self.comm = TracedCommunicator(comm, self.trace)

    def save(self, folder: str | None) -> list[str]:
        """Write the recordings of all ranks (collective); return lines about it on the rank that wrote."""
        if self.trace is None:
            return []
        self._read_clock()
        own, lanes = self._lane(self.trace), list[Lane]()
        for rank in range(self._all.size):
            # One after the other: all of them may be too large for each rank.
            pickled = self._all.broadcast_object(pickle.dumps(own) if rank == self._all.rank else None, rank)
            if folder is not None:
                lanes.append(pickle.loads(cast("bytes", pickled)))
        return [] if folder is None else [_write(lanes, RunFolder(Path(folder)))]

    def _lane(self, trace: Trace) -> Lane:
        return Lane(f"rank {self._all.rank}", self._host, socket.gethostname(), trace, tuple(self._readings))

    def _read_clock(self) -> None:
        self._host = cast("int", self._all.node.broadcast_object(self._all.rank))
        reading = compare_clocks(self._all, self._all.clock)
        if reading is not None:
            self._readings.append(reading)


def _write(lanes: list[Lane], folder: RunFolder) -> str:
    for lane in lanes:
        if lane.trace.left_out:
            warn_on_stderr(
                f"the trace of {lane.name} is full: {lane.trace.left_out:,} spans after its first "
                f"{lane.trace.limit:,} were left out; trace fewer steps (--steps)"
            )
    return f"trace: {folder.write_trace(lanes)}; open it at https://ui.perfetto.dev"
