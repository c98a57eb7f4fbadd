"""The jobs left for this launch, if several work on one farm. No torch.

source ──next──► finished, or failed just now ──► ended, at once
                 this launch has claimed it   ──► its blocks
                 another launch has it        ──► checked again, until one of the others is true
"""

from __future__ import annotations

import time

from tutti.farm.coordinator import LOOK_S, JobFound, Listener
from tutti.farm.jobs import FarmJob, JobOutcome, JobSource
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.launches import Launch
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import ERROR, RunFolder


class Unclaimed:
    """The jobs of a source that no other launch works on; `listener` hears of jobs that ended elsewhere."""

    def __init__(self, folder: FarmFolder, launch: Launch, source: JobSource, listener: Listener) -> None:
        self._folder, self._launch, self._source, self._listener = folder, launch, source, listener
        self._elsewhere: list[FarmJob] = []
        self._look_at = 0.0

    def next(self) -> FarmJob | None:
        """Return a job for this launch only."""
        while (job := self._source.next()) is not None:
            if self._is_ours(job):
                return job
        if time.monotonic() < self._look_at:
            return None
        others, self._elsewhere = self._elsewhere, []
        for number, job in enumerate(others):
            if self._is_ours(job):
                self._elsewhere = others[number + 1 :] + self._elsewhere
                return job
        self._look_at = time.monotonic() + LOOK_S / 2
        # Results of other launches may let the source go on.
        return self.next() if len(self._elsewhere) < len(others) else None

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Pass it on."""
        return self._source.epoch(job, record)

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Pass it on; later launches may retry a failed job."""
        self._launch.release(job.name)
        self._source.ended(job, outcome)

    def elsewhere(self) -> bool:
        """Return whether others work on jobs of the source."""
        return bool(self._elsewhere)

    def _is_ours(self, job: FarmJob) -> bool:
        """Claim a job; False: it has ended, which the source now knows, or another launch has it."""
        state, found = self._folder.state(job.name), False
        if state not in (JobState.FINISHED, JobState.RUNNING) and not self._has_failed(job, state):
            found = self._launch.claim(job.name)
            # Another launch may have finished it just now.
            state = self._folder.state(job.name)
        if state is JobState.FINISHED:
            if found:
                self._launch.release(job.name)
            summary = RunFolder(self._folder.job(job.name)).read(Summary)
            self._end(job, JobOutcome(state, 0.0, summary))
            return False
        if not found and self._has_failed(job, state):
            why = (RunFolder(self._folder.job(job.name)).error() or "").strip().rpartition("\n")[2]
            self._end(job, JobOutcome(state, 0.0, None, why))
            return False
        if not found:
            self._elsewhere.append(job)
        return found

    def _has_failed(self, job: FarmJob, state: JobState) -> bool:
        """Return whether another launch has just failed at a job."""
        error = self._folder.job(job.name) / ERROR
        return state is JobState.FAILED and self._launch.is_news(error)

    def _end(self, job: FarmJob, outcome: JobOutcome) -> None:
        self._listener(JobFound(job, outcome))
        self._source.ended(job, outcome)
