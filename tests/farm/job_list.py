"""A source of jobs for tests: a list, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.records.run import EpochRecord


class JobList:
    """Jobs in the order given; `outcomes` has those that have ended, by name."""

    def __init__(self, jobs: Iterable[FarmJob]) -> None:
        self._waiting = deque(jobs)
        self.outcomes: dict[str, JobOutcome] = {}

    def next(self) -> FarmJob | None:
        """Return the next job."""
        return self._waiting.popleft() if self._waiting else None

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Let the job go on."""
        return False

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Note the outcome."""
        self.outcomes[job.name] = outcome
