"""Checkpoints of a training run: when they are due, and what is in them. Runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, cast

from tutti.checkpoint.in_memory import MemorySaver
from tutti.checkpoint.memory_files import MemoryPlace
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.launch.stop_request import stop_requested
from tutti.records import checkpoints
from tutti.records.json_lines import Json, parse_record
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.run.build import Assembly
from tutti.run.restore import facts_of
from tutti.state import State
from tutti.strategies.base import Pace
from tutti.training.agenda import Agenda, Decision, Wishes
from tutti.training.intervals import AUTO, Every

ASKED: Final = "it was asked to"
"""Why a run stops on a signal."""


class Saving:
    """The checkpoints of one run, as one of its ranks sees them (collective over the workers)."""

    def __init__(
        self,
        comm: Communicator,
        parts: Assembly,
        disk: Saver | None,
        memory: MemorySaver | None,
        wishes: Wishes,
    ) -> None:
        self._comm, self._parts, self._disk, self._memory, self._wishes = comm, parts, disk, memory, wishes
        self.lost = False  # the state with which the run was to stop could not be written
        self.step: int | None = None  # the updates that were made when the state was last saved

    def agenda(self) -> Agenda:
        """Return the times at which this run is saved, or stops."""
        return Agenda(self._comm, self._wishes)

    @cached_property
    def _facts(self) -> Json:
        """Identity of model and data. Reading the data takes time: it is done when first needed."""
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
    resumed: bool,  # the user goes on with an earlier run, whose end is saved
) -> Iterator[Saving | None]:
    """Make what saves a run (collective over the workers); None if nothing is to be saved."""
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
        yield Saving(comm, parts, disk, copier, wishes)


def is_over(deadline: float | None) -> bool:
    """Return whether a run's time is over."""
    return deadline is not None and time.time() >= deadline


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # There are checkpoints in it.
        folder.rmdir()
