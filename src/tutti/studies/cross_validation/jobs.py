"""The jobs of a cross-validation, in an order that keeps all blocks busy to the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import mean

from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.records.farm_folder import JobState
from tutti.records.run import EpochRecord


class FoldJobs:
    """The jobs of all folds of all candidates: first one of each, then the longest, by what those have taken.

    Args:
        candidates: the jobs of each, by name.
    """

    def __init__(self, candidates: Mapping[str, Sequence[FarmJob]]) -> None:
        self._waiting = {name: deque(jobs) for name, jobs in candidates.items()}
        self._candidate = {job.name: name for name, jobs in candidates.items() for job in jobs}
        self._first = deque(self._waiting)
        self._seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def next(self) -> FarmJob | None:
        """Return the first fold of the next candidate; of what is left then the longest."""
        if self._first:
            return self._waiting[self._first.popleft()].popleft()
        left = [name for name, jobs in self._waiting.items() if jobs]
        if not left:
            return None
        return self._waiting[max(left, key=self._expected)].popleft()

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Let the job go on."""
        return False

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Note how long it has taken."""
        if outcome.state is JobState.FINISHED and outcome.summary is not None:
            self._seconds[self._candidate[job.name]].append(outcome.summary.seconds)

    def _expected(self, name: str) -> float:
        """The seconds of a job of a candidate; of one whose first fold still runs, more than any."""
        known = self._seconds[name]
        return mean(known) if known else float("inf")
