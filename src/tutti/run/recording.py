"""The records of a run beside its results: heartbeats, usage, and if asked for a trace and profiles."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch.profiler import ProfilerActivity, profile

from tutti.comm.base import Communicator
from tutti.comm.clock_offset import compare_clocks
from tutti.comm.traced import traced
from tutti.errors import BadOption
from tutti.launch.usage_sampler import Sampler
from tutti.records.run_folder import CONFIG, RunFolder
from tutti.records.trace import ClockReading, Lane, Trace
from tutti.run.train_job import TrainJob
from tutti.training.heartbeat import HeartbeatThread
from tutti.training.progress import Progress


@contextmanager
def observed(
    comm: Communicator, folder: RunFolder | None, sampler: Sampler | None, wanted: bool
) -> Iterator[Progress]:
    """Have cores and memory sampled into the run folder, and write heartbeats there (collective).

    Args:
        comm: the workers.
        folder: what rank 0 has made, with the configuration in it; None elsewhere.
        sampler: of this host, on one of its ranks.
        wanted: whether there is a run folder; the same on all ranks.

    Yields:
        What leaves this rank's signs. On a host that does not see the folder there are none, and no samples.
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


ROWS = 40
"""Rows of the table: the operators that take longest."""

QUIET: Final = ("KINETO_LOG_LEVEL", "6")
"""The setting that keeps the profiler from printing lines such as "USDT: ... profiler_start". It silences its
errors too, which without a GPU are nothing that a user could act on."""


class Profiler:
    """The profiler of steps `first` to `last`, counted from 1. Call it before each step.

    Attributes:
        found: the operators that took longest, as a table, and all of them, as JSON in Chrome's trace event
            format, once the last of the steps, or the run, is over; None before.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profile: profile | None = None
        self.found: tuple[str, bytes] | None = None

    def __call__(self, made: int) -> None:
        """Begin or end the profile, if it is time.

        Args:
            made: the number of steps made before.
        """
        if self._profile is not None and made >= self._last:
            self.close()
        elif self._profile is None and self.found is None and self._first - 1 <= made < self._last:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            if not gpu:
                os.environ.setdefault(*QUIET)
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.start()

    def close(self) -> None:
        """End the profile, if it is under way."""
        if self._profile is None:
            return
        self._profile.stop()
        operators = self._profile.key_averages()
        on_gpu = any(operator.self_device_time_total for operator in operators)
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = operators.table(sort_by=by, row_limit=ROWS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            # torch indents its JSON; without, it is a third as large.
            trace = json.dumps(json.loads(path.read_bytes()), separators=(",", ":")).encode()
        self._profile, self.found = None, (table, trace)


@dataclass(frozen=True)
class RankRecording:
    """The recordings of one rank: its lane in the trace, and its profile, a table and a trace of its own."""

    lane: Lane | None
    profile: tuple[str, bytes] | None


class Recording:
    """One rank's recordings (collective over all ranks of the job, servers included).

    Args:
        comm: all ranks of the job.
        job: what it asks for.

    Attributes:
        comm: the same ranks; what passes through this communicator is recorded.
        trace: where each stage is noted; None: nowhere.
        profiler: is to be called before each step; None: of this rank none is profiled.
    """

    def __init__(self, comm: Communicator, job: TrainJob) -> None:
        self._all, self._job = comm, job
        self.profiler: Profiler | None = None
        self.trace = Trace() if job.trace else None
        self._readings: list[ClockReading] = []
        self.comm = comm
        if self.trace is not None:
            self._read_clock()
            self.comm = traced(comm, self.trace)

    def profile(self, updates: int) -> None:
        """Make the profiler of a run of so many steps, where one is asked for.

        Raises:
            BadOption: the run has not as many steps as are to be profiled.
        """
        wanted = self._job.profile
        if wanted is None:
            return
        if wanted.last > updates:
            raise BadOption(
                f"--profile is {wanted.first}-{wanted.last}, but the run has {updates} steps; give steps "
                "among them"
            )
        if self._all.rank in wanted.ranks:
            self.profiler = Profiler(wanted.first, wanted.last)

    def save(self, folder: str | None) -> list[str]:
        """Bring together what all ranks have recorded, and write it (collective over all ranks of the job).

        Args:
            folder: the run folder, on the rank that has made it; None on all others.

        Returns:
            Lines that say what was written, on that rank; none on the others.

        Raises:
            BadRunFolder: it cannot be written.
        """
        if self.trace is None and self._job.profile is None:
            return []
        if self.trace is not None:
            self._read_clock()
        writer = next(
            (rank for rank, has in enumerate(self._all.all_gather_objects(folder is not None)) if has), 0
        )
        own, parts = self._part(), []
        for rank in range(self._all.size):
            # One after the other, and unpickled by the writer: all of them may be too large for each rank.
            pickled = self._all.broadcast_object(pickle.dumps(own) if rank == self._all.rank else None, rank)
            if self._all.rank == writer:
                parts.append(cast("RankRecording", pickle.loads(cast("bytes", pickled))))
        return [] if folder is None else _write(parts, RunFolder(Path(folder)), whole=True)

    def rescue(self, folder: RunFolder) -> None:
        """Write what this rank has recorded, after a failure; not collective."""
        if self.trace is not None:
            _write([self._part()], folder, whole=False)

    def _part(self) -> RankRecording:
        if self.profiler is not None:
            self.profiler.close()
        profile = self.profiler.found if self.profiler is not None else None
        return RankRecording(None if self.trace is None else self._lane(self.trace), profile)

    def _lane(self, trace: Trace) -> Lane:
        return Lane(f"rank {self._all.rank}", self._host, socket.gethostname(), trace, tuple(self._readings))

    def _read_clock(self) -> None:
        self._host = cast("int", self._all.node.broadcast_object(self._all.rank))
        reading = compare_clocks(self._all, self._all.clock)
        if reading is not None:
            self._readings.append(reading)


def _write(parts: list[RankRecording], folder: RunFolder, whole: bool) -> list[str]:
    lines = []
    lanes = [part.lane for part in parts if part.lane is not None]
    if lanes:
        lines.append(f"trace: {folder.write_trace(lanes, whole)}; open it at https://ui.perfetto.dev")
    for rank, part in enumerate(parts):
        if part.profile is not None:
            table, trace = folder.write_profile(rank, *part.profile)
            lines.append(f"profile of rank {rank}: {table}, and as a trace {trace}")
    for lane in lanes:
        if lane.trace.left_out:
            print(
                f"tutti: warning: the trace of {lane.name} is full: {lane.trace.left_out:,} spans after its "
                f"first {lane.trace.limit:,} were left out; trace fewer steps (--steps)",
                file=sys.stderr,
            )
    return lines
