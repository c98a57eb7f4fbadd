"""Checkpoints of a training run: when they are due, and what is in them. Runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Final, cast

from tutti.checkpoint.in_memory import MemorySaver
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.launch.stop_request import stop_requested
from tutti.records import checkpoints
from tutti.records.json_lines import Json, parse_record
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.run.build import Assembly
from tutti.run.restore import facts_of
from tutti.run.train_job import TrainJob
from tutti.state import State
from tutti.strategies.base import Pace
from tutti.training.agenda import Agenda, Decision, Wishes
from tutti.training.intervals import AUTO, Every, seconds_of

ASKED: Final = "it was asked to"
"""Why a run stops on a signal."""


class Saving:
    """The checkpoints of one run, as one of its ranks sees them (collective over the workers).

    Args:
        job: the run.
        comm: the workers.
        parts: of the run.
        disk: writes checkpoints; None: the run has no folder.
        memory: copies the state; None: no ranks would go on from it.

    Attributes:
        lost: the state with which the run was to stop could not be written.
        step: the updates that were made when the state was last saved; None: it was not.
    """

    def __init__(
        self,
        job: TrainJob,
        comm: Communicator,
        parts: Assembly,
        disk: Saver | None,
        memory: MemorySaver | None,
    ) -> None:
        self._job, self._comm, self._parts, self._disk, self._memory = job, comm, parts, disk, memory
        self.lost = False
        self.step: int | None = None

    def agenda(self) -> Agenda:
        """Return the times at which this run is saved, or stops."""
        config, job, strategy = self._parts.config, self._job, self._parts.strategy
        first = self._comm.rank == 0

        def stop() -> str | None:
            if first and _is_over(job):
                return f"its time limit of {config.time_limit} is over"
            return ASKED if stop_requested() else None

        copies: Callable[[], bool] | None = None
        if job.memory is not None:
            # Rank 0 decides; other hosts cannot read the memory.
            copies = job.memory.copy_wish() if first else lambda: False
        free, period = strategy.pace is Pace.FREE, strategy.period
        if self._disk is None:
            return Agenda(self._comm, Wishes(copies=copies, free=free, period=period))
        every = Every.parse(config.checkpoint, "--checkpoint")
        end = config.checkpoint != AUTO or (job.resume is not None and not job.resume.again)
        return Agenda(self._comm, Wishes(every, copies, end, stop, free, period))

    @cached_property
    def _facts(self) -> Json:
        """Identity of model and data. Reading the data takes time: it is done when first needed."""
        return facts_of(self._parts.config, self._parts.task.dataset) if self._comm.rank == 0 else {}

    def save(self, step: int, state: State, decision: Decision) -> None:
        """Keep this rank's state; that of the end, or of a stop, is on the disk when this returns."""
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


def refuse_over(comm: Communicator, job: TrainJob) -> None:
    """Refuse a run whose time limit is over before its first step (collective)."""
    if comm.broadcast_object(_is_over(job)):
        raise BadOption(
            f"--time-limit is '{job.config.time_limit}', which is over before the first step: to come there "
            f"took {time.time() - job.began:.1f} s; give more"
        )


def _is_over(job: TrainJob) -> bool:
    """Return whether the run's time limit is over."""
    limit = job.config.time_limit
    return limit is not None and time.time() - job.began >= seconds_of(limit, "--time-limit")


@contextmanager
def saving(
    job: TrainJob, comm: Communicator, parts: Assembly, folder: RunFolder | None
) -> Iterator[Saving | None]:
    """Make what saves a run (collective); None if nothing is to be saved."""
    disk = memory = None
    with ExitStack() as stack:
        if job.write:
            path = comm.broadcast_object(
                None if folder is None else folder.path.absolute() / checkpoints.FOLDER
            )
            if folder is not None:
                stack.callback(_remove_empty, folder.path / checkpoints.FOLDER)
            disk = stack.enter_context(Saver(comm, cast("Path", path), parts.config.keep))
        if job.memory is not None:
            memory = stack.enter_context(closing(MemorySaver(comm, job.memory)))
        yield Saving(job, comm, parts, disk, memory) if job.write or job.memory is not None else None


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # There are checkpoints in it.
        folder.rmdir()
