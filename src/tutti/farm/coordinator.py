"""The coordinator of a farm: hands jobs to blocks of ranks, and brings each to an end. No torch.

    source ──next──► coordinator ──begin──► pool of blocks
           ◄─ended──             ◄─events──   of this host (`blocks`)

It knows blocks by their numbers and time by the pool's clock, so tests run it on simulated blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final, Protocol

from tutti.farm.jobs import FarmJob, JobOutcome, JobSource
from tutti.records.farm_folder import JobState
from tutti.records.run import EpochRecord, Summary
from tutti.run.train_job import TrainJob

STOP_S: Final = 600.0
"""Time that a job has to save its state after the request to stop."""

LOOK_S: Final = 0.2
"""Pause between two checks whether another launch has left a job."""


# --- messages to and from the ranks of a block, which a pool passes on


@dataclass(frozen=True)
class TrainTask:
    """A job to train; the ranks answer with an `EpochOver` for each epoch, and a `JobOver`."""

    block: int
    job: TrainJob
    log: Path  # for their output
    asks: bool = False  # rank 0 waits after each epoch for a bool: whether to end


@dataclass(frozen=True)
class BlockReady:
    """The ranks of the block have met."""


@dataclass(frozen=True)
class EpochOver:
    """A block has trained an epoch of its job."""

    block: int
    record: EpochRecord


@dataclass(frozen=True)
class JobOver:
    """A block has finished its job, and is free: its summary, or why it has stopped."""

    block: int
    summary: Summary | None
    stopped: str = ""


@dataclass(frozen=True)
class BlockFailed:
    """The job of a block has failed (why: in one line), or one of its ranks has died without a report."""

    block: int
    why: str
    traceback: str = ""
    died: bool = False


@dataclass(frozen=True)
class StopAsked:
    """The farm must save and stop."""

    why: str


PoolEvent = EpochOver | JobOver | BlockFailed | StopAsked


class Pool(Protocol):
    """A number of blocks of ranks."""

    blocks: int

    def now(self) -> float:
        """Return the time in seconds, by the clock of the pool."""
        ...

    def begin(self, block: int, job: FarmJob) -> None:
        """Start a job on a free block."""
        ...

    def wait(self, until: float) -> Sequence[PoolEvent]:
        """Wait for events until the time `until`, which may be infinite, and return them."""
        ...

    def answer(self, block: int, ends: bool) -> None:
        """Inform the block of a prunable job whether the job ends with the finished epoch."""
        ...

    def ask_to_stop(self) -> None:
        """Ask all blocks to save and stop."""
        ...

    def restart(self, block: int) -> JobOver | None:
        """Kill a block's ranks and start others; return a `JobOver` that has just come, if any."""
        ...


# --- what listeners hear


@dataclass(frozen=True)
class JobBegan:
    """A block has begun to work on a job."""

    job: FarmJob
    block: int


@dataclass(frozen=True)
class EpochEnded:
    """A block has trained an epoch of a job."""

    job: FarmJob
    block: int
    record: EpochRecord


@dataclass(frozen=True)
class JobEnded:
    """A job has come to an end on a block."""

    job: FarmJob
    block: int
    outcome: JobOutcome
    traceback: str = ""


@dataclass(frozen=True)
class JobFound:
    """A job has ended in another launch."""

    job: FarmJob
    outcome: JobOutcome


@dataclass(frozen=True)
class FarmStopping:
    """The farm has been asked to save and stop; no further job begins."""

    why: str


Happening = JobBegan | EpochEnded | JobEnded | JobFound | FarmStopping
Listener = Callable[[Happening], None]


@dataclass(frozen=True)
class FarmOutcome:
    """The end of the work on a farm."""

    stopped: str | None  # why it stopped before the source was empty
    seconds: float
    busy_s: float  # of all blocks' work on jobs, added up
    blocks: int
    ended: Counter[JobState]  # the number of jobs by their final state


@dataclass
class _Work:
    """The job that a block works on."""

    job: FarmJob
    began: float


@dataclass
class Coordinator:
    """The coordinator."""

    pool: Pool
    source: JobSource
    job_timeout_s: float | None = None  # a job that takes longer counts as hanging; None: never
    time_limit_s: float | None = None  # the farm saves and stops then; None: never
    listener: Listener | None = None  # hears of every event
    elsewhere: Callable[[], bool] = lambda: False  # whether other launches work on jobs of the source
    _free: list[int] = field(default_factory=list)
    _running: dict[int, _Work] = field(default_factory=dict)  # by block; the longest-running one first
    _ended: Counter[JobState] = field(default_factory=Counter)
    _busy_s: float = 0.0
    _stopped: str | None = None
    _asked_at: float = inf

    def run(self) -> FarmOutcome:
        """Hand out jobs until none is left and none runs, here or elsewhere, or the farm has stopped."""
        began = self.pool.now()
        over = began + (self.time_limit_s or inf)
        self._free = list(range(self.pool.blocks))[::-1]
        while True:
            self._hand_out()
            waits = self._stopped is None and self.elsewhere()
            if not self._running and not waits:
                break
            look = self.pool.now() + LOOK_S if waits and self._free else inf
            for event in self.pool.wait(min(look, over if self._stopped is None else inf, self._deadline())):
                self._handle(event)
            while self.pool.now() >= self._deadline():
                self._give_up(next(iter(self._running)))
            if self._stopped is None and self.pool.now() >= over:
                self._stop("its time limit is over")
        seconds = self.pool.now() - began
        return FarmOutcome(self._stopped, seconds, self._busy_s, self.pool.blocks, self._ended)

    def _hand_out(self) -> None:
        while self._free and self._stopped is None and (job := self.source.next()) is not None:
            block = self._free.pop()
            self._running[block] = _Work(job, self.pool.now())
            self._tell(JobBegan(job, block))
            self.pool.begin(block, job)

    def _deadline(self) -> float:
        """Return the time at which to give up the first running job."""
        if not self._running:
            return inf
        work = next(iter(self._running.values()))
        return min(work.began + (self.job_timeout_s or inf), self._asked_at + STOP_S)

    def _handle(self, event: PoolEvent) -> None:
        if isinstance(event, StopAsked):
            self._stop(event.why)
        elif event.block not in self._running:
            # A rank that dies between two jobs spoils none.
            return
        elif isinstance(event, EpochOver):
            self._epoch(event)
        elif isinstance(event, JobOver):
            state = JobState.FINISHED if event.summary is not None else JobState.STOPPED
            self._end(event.block, state, event.summary, event.stopped)
        else:
            # SIGTERM may have been sent to all processes of the farm.
            stopped = self._stopped is not None and event.died
            state = JobState.STOPPED if stopped else JobState.FAILED
            self._end(event.block, state, None, event.why, event.traceback)

    def _epoch(self, event: EpochOver) -> None:
        work = self._running[event.block]
        self._tell(EpochEnded(work.job, event.block, event.record))
        ends = self.source.epoch(work.job, event.record)
        if work.job.prunable:
            self.pool.answer(event.block, ends)

    def _give_up(self, block: int) -> None:
        """End a job that hangs, or that does not stop."""
        work, limit = self._running[block], self.job_timeout_s
        over = self.pool.restart(block)
        if over is not None:
            self._handle(over)
        elif limit is not None and self.pool.now() >= work.began + limit:
            why = f"it was not done after {limit:g} s, its time limit (--job-timeout)"
            self._end(block, JobState.FAILED, None, why)
        else:
            self._end(block, JobState.STOPPED, None, "it was ended, as it did not stop when asked to")

    def _end(
        self, block: int, state: JobState, summary: Summary | None, why: str, traceback: str = ""
    ) -> None:
        work = self._running.pop(block)
        outcome = JobOutcome(state, self.pool.now() - work.began, summary, why)
        self._busy_s += outcome.seconds
        self._ended[state] += 1
        self._free.append(block)
        # The listener writes down what the source may read.
        self._tell(JobEnded(work.job, block, outcome, traceback))
        self.source.ended(work.job, outcome)

    def _stop(self, why: str) -> None:
        if self._stopped is None:
            self._stopped, self._asked_at = why, self.pool.now()
            self._tell(FarmStopping(why))
            self.pool.ask_to_stop()

    def _tell(self, what: Happening) -> None:
        if self.listener is not None:
            self.listener(what)
