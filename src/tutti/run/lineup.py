"""The ranks that train in a run, and the job that others would have instead of them. Needs no torch."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from typing import Final

from typing_extensions import override

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import BadOption
from tutti.launch.crew import Orders
from tutti.launch.placement import Placement, fill
from tutti.run.batch_rule import resized, resized_text
from tutti.run.train_job import TrainJob, again

AHEAD_BYTES: Final = 512 << 20
"""The largest data set that ranks in reserve on hosts read ahead, so that each host has it twice."""


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
        # Ranks that were lost may hold their memory still, and fewer need no more.
        shrinks = workers < self.placement.workers
        return job, job.placement(memory_bytes=sys.maxsize if shrinks else None)

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


class LineupOnHosts(Lineup):
    """Who trains now, on hosts of which the first is this machine."""

    @override
    def of(self, workers: int) -> tuple[TrainJob, Placement]:
        places = self.placement.places
        room = sum(host.ranks for host in places)
        if workers > room:
            raise BadOption(
                f"the hosts have places for {ranks_text(room, 'worker')}, not for {workers}; ask for "
                "fewer, or stop the run, and go on with it by --resume and more --hosts"
            )
        placement = replace(self.placement, workers=workers, hosts=fill(places, workers))
        job = self.job_on(placement)
        if not self._reads_ahead:
            from tutti.run.checks import check_job  # It imports torch.

            check_job(job, placement.ranks, len(placement.hosts))
        return job, placement

    @override
    def in_reserve(self, job: TrainJob, placement: Placement) -> Orders:
        job = replace(job, memory=None, takes_over=True)
        return Orders(pickle.dumps(job) if self._reads_ahead else b"", placement, waits=True)

    def job_on(self, placement: Placement) -> TrainJob:
        """Return the job of others, which has the hosts that are left for those who resume it later."""
        job = resized(self.job, self._first, self._workers, placement.workers)
        hosts = ",".join(f"{host.name}:{host.ranks}" for host in placement.places)
        return replace(job, config=replace(job.config, workers=str(placement.workers), hosts=hosts))

    @property
    def _reads_ahead(self) -> bool:
        nbytes = self.memory.place.data_bytes
        return nbytes is not None and nbytes <= AHEAD_BYTES


def ranks_text(count: int, kind: str = "rank") -> str:
    """Name a number of ranks."""
    return f"{count} {kind}{'' if count == 1 else 's'}"
