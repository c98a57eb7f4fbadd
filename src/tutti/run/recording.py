"""The records of a run beside its results: heartbeats, usage, and a trace if asked for."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import cast

from tutti.comm.base import Communicator
from tutti.comm.clock_offset import compare_clocks
from tutti.comm.traced import TracedCommunicator
from tutti.launch.usage_sampler import Sampler
from tutti.records.run_folder import CONFIG, RunFolder
from tutti.records.trace import ClockReading, Lane, Trace
from tutti.terminal import warn_on_stderr
from tutti.training.heartbeat import HeartbeatThread
from tutti.training.progress import Progress


@contextmanager
def observed(
    comm: Communicator, folder: RunFolder | None, sampler: Sampler | None, wanted: bool
) -> Iterator[Progress]:
    """Sample cores and memory into the run folder, and yield what writes heartbeats there (collective).

    On a host that does not see the folder there are neither samples nor heartbeats.
    """
    seen = _seen(comm, folder) if wanted else None
    host = socket.gethostname()
    first = comm.broadcast_object(host) if wanted else None
    if sampler is not None and seen is not None:
        sampler.begin(seen.usage_file(None if host == first else host))
    with nullcontext(Progress()) if seen is None else HeartbeatThread(seen, comm.rank) as heart:
        yield heart


def _seen(comm: Communicator, folder: RunFolder | None) -> RunFolder | None:
    """The run folder as this rank sees it, if it does (collective)."""
    seen = None if folder is None else RunFolder(folder.path.absolute())
    given = comm.broadcast_object(None if seen is None else (str(seen.path), _mark(seen.path)))
    if seen is not None:
        return seen
    name, mark = cast("tuple[str, tuple[int, ...]]", given)
    with suppress(OSError):
        # Another host may have a folder of the same name, left by an earlier run.
        return RunFolder(Path(name)) if _mark(Path(name)) == mark else None
    return None


def _mark(folder: Path) -> tuple[int, ...]:
    """Return a mark that tells this folder's configuration from any other file of that name, on any host."""
    found = os.stat(folder / CONFIG)
    return found.st_mtime_ns, found.st_size, found.st_ino


class Recording:
    """One rank's recordings (collective over all ranks of the job, servers included).

    Attributes:
        comm: the same ranks; what passes through this communicator is recorded.
        trace: where each stage is noted; None: nowhere.
    """

    def __init__(self, comm: Communicator, traces: bool) -> None:
        self._all = comm
        self.trace = Trace() if traces else None
        self._readings: list[ClockReading] = []
        self.comm = comm
        if self.trace is not None:
            self._read_clock()
            self.comm = TracedCommunicator(comm, self.trace)

    def save(self, folder: str | None) -> list[str]:
        """Write what all ranks have recorded (collective); returns lines about it on the rank that wrote."""
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
