"""Checkpoints of a training run: when they are due, and what is in them. Runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, cast

from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.launch.stop_request import stop_requested
from tutti.records import checkpoints
from tutti.records.json_lines import Json, parse_record
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.run.build import Assembly
from tutti.run.restore import facts_of, warn_of_lost
from tutti.run.train_job import TrainJob
from tutti.state import State
from tutti.strategies import Strategy
from tutti.strategies.base import Pace
from tutti.training.agenda import Agenda, Wishes
from tutti.training.intervals import AUTO, Every, seconds_of

ASKED: Final = "it was asked to"
"""Why a run stops on a signal."""


class Saving:
    """The checkpoints of one run, as one of its ranks sees them (collective over the workers).

    Args:
        job: the run.
        comm: the workers.
        parts: of the run.
        folder: of the run, on every host that sees it.

    Attributes:
        folder: of the run.
        lost: the state with which the run was to stop could not be written.
        step: the updates that were made when the state was last saved; None: it was not.
    """

    def __init__(self, job: TrainJob, comm: Communicator, parts: Assembly, folder: Path) -> None:
        self._job, self._comm, self._parts = job, comm, parts
        self.saver = Saver(comm, folder / checkpoints.FOLDER, parts.config.keep)
        self.folder, self.lost = folder, False
        self.step: int | None = None

    def agenda(self, strategy: Strategy) -> Agenda:
        """Return the times at which this run is saved, or stops."""
        config, over = self._parts.config, _over(self._job)

        def stop() -> str | None:
            if over is not None and self._comm.rank == 0 and time.time() >= over:
                return f"its time limit of {config.time_limit} is over"
            return ASKED if stop_requested() else None

        every = Every.parse(config.checkpoint, "--checkpoint")
        end = config.checkpoint != AUTO or self._job.resume is not None
        return Agenda(self._comm, Wishes(every, end, stop, strategy.pace is Pace.FREE, strategy.period))

    def _facts(self) -> Json:
        """Identity of model and data. Reading the data takes time: most runs save rarely."""
        return facts_of(self._parts.config, self._parts.task.dataset) if self._comm.rank == 0 else {}

    def save(self, step: int, state: State, final: bool) -> None:
        """Keep this rank's state; that of the end, or of a stop, is on the disk when this returns."""
        history = state.shared["training"]["history"]
        last = parse_record(history[-1], EpochRecord) if history else None
        score = None if last is None else self._parts.ending.ranking.score(last)
        if self.step is None and self._comm.rank == 0:
            warn_of_lost([state.joint, state.alone])
        self.step = step
        self.saver.save(step, self._parts.portion.to_whole(state), self._facts(), score, wait=final)
        if final:
            self.lost = cast("bool", self._comm.broadcast_object(self.saver.last != step))


def refuse_over(comm: Communicator, job: TrainJob) -> None:
    """Refuse a run whose time limit is over before its first step (collective).

    Raises:
        BadOption: it is.
    """
    over = _over(job)
    if over is None:
        return
    now = cast("float", comm.broadcast_object(time.time()))
    if now >= over:
        raise BadOption(
            f"--time-limit is '{job.config.time_limit}', which is over before the first step: to come there "
            f"took {now - job.began:.1f} s; give more"
        )


def _over(job: TrainJob) -> float | None:
    """The time at which the run's limit is over, in seconds since the epoch; None: it has none."""
    limit = job.config.time_limit
    return None if limit is None else job.began + seconds_of(limit, "--time-limit")


@contextmanager
def saving(
    job: TrainJob, comm: Communicator, parts: Assembly, folder: RunFolder | None
) -> Iterator[Saving | None]:
    """Make what saves a run (collective); None if it has no folder."""
    if not job.write:
        yield None
        return
    path = comm.broadcast_object(None if folder is None else folder.path.absolute())
    made = Saving(job, comm, parts, cast("Path", path))
    try:
        with made.saver:
            yield made
    finally:
        if folder is not None:
            with suppress(OSError):  # There are checkpoints in it.
                (folder.path / checkpoints.FOLDER).rmdir()
