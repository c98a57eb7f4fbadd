"""The ranks that train in a run, and the job that others would have instead of them. Needs no torch."""

from __future__ import annotations

import pickle
from dataclasses import replace

from tutti.checkpoint.memory_files import StateMemory
from tutti.launch.crew import Orders
from tutti.launch.placement import Placement
from tutti.run.batch_rule import resized, resized_text
from tutti.run.train_job import TrainJob, again


class Lineup:
    """Who trains now.

    Args:
        job: that of the first ranks; it has the memory's place.
        placement: where they run.
        memory: that of the state, from which others go on.

    Attributes:
        job: that of those who train now.
        placement: theirs.
        memory: that of the state.
    """

    def __init__(self, job: TrainJob, placement: Placement, memory: StateMemory) -> None:
        self.job, self.placement, self.memory = job, placement, memory
        self._first, self._workers = job.config, placement.workers

    def of(self, workers: int) -> tuple[TrainJob, Placement]:
        """The job of so many workers, and where they would run.

        Raises:
            BadOption: there cannot be so many.
        """
        job = resized(self.job, self._first, self._workers, workers)
        return job, job.placement()

    def in_reserve(self, job: TrainJob, placement: Placement) -> Orders:
        """The work of ranks that prepare themselves, and wait until those who train now are gone."""
        job = replace(job, gate=self.memory.shut_gate(), rehearses=True)
        return Orders(pickle.dumps(job), placement, waits=True)

    def change_to(self, job: TrainJob, placement: Placement, why: str) -> str:
        """Have others train from now on; returns what to say of their batch and learning rate.

        Args:
            job: theirs.
            placement: where they run.
            why: they do, for the records of the run.

        Raises:
            BadRunFolder: that of the run is gone.
        """
        self.job, self.placement = again(replace(job, takes_over=True)), placement
        self.memory.place.note_takeover(why)
        return resized_text(self.job, self._first)


def ranks_text(count: int, kind: str = "rank") -> str:
    """Name a number of ranks."""
    return f"{count} {kind}{'' if count == 1 else 's'}"
