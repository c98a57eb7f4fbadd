"""The jobs of a search: a trial has one run, or one for each fold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.records.farm_folder import JobState
from tutti.records.run import EpochRecord, Summary
from tutti.studies.score import Score
from tutti.studies.search.trials import COMPLETE, FAILED, PRUNED, Trials

Jobs = Callable[[int, Mapping[str, Any]], Sequence[FarmJob]]
"""Makes the jobs of a trial from its number and its options."""


@dataclass
class _Trial:
    """A trial that has not ended."""

    number: int
    jobs: Sequence[FarmJob]  # one for each fold
    started: int = 0  # the number of jobs that were handed out
    running: int = 0  # the number of these that still run
    epochs: dict[int, dict[int, float]] = field(default_factory=dict)  # values by fold and epoch
    ended: dict[int, list[float]] = field(default_factory=dict)  # the final values by fold
    pruned: bool = False  # it is unpromising
    failed: bool = False  # one of its jobs failed


class SearchJobs:
    """The jobs of a search.

    With a pruner the folds of a trial are trained one after the other, and trials are compared after each
    epoch by the mean over the folds so far. Without a pruner all folds may be trained at once.
    """

    def __init__(
        self,
        trials: Trials,
        count: int,  # the number of trials
        jobs: Jobs,
        scores: Sequence[Score],  # the objectives
        prunes: bool,  # trials may end early
        span: int,  # the most epochs of a job
        history: Callable[[str], Iterable[EpochRecord]],  # reads the epochs of a job from its folder
    ) -> None:
        self._trials, self._count, self._jobs, self._scores = trials, count, jobs, scores
        self._prunes, self._span, self._history = prunes, span, history
        self._waiting: deque[_Trial] = deque()
        self._of: dict[str, tuple[_Trial, int]] = {}
        self._begin(trials.take_over())

    def next(self) -> FarmJob | None:
        """Return the next job of the running trials, or else the first job of a new one."""
        if not self._waiting:
            number = self._trials.ask(self._count)
            # If there is no new trial, take over those of killed launches.
            self._begin(self._trials.take_over() if number is None else [number])
        if not self._waiting:
            return None
        trial = self._waiting[0]
        job = trial.jobs[trial.started]
        self._of[job.name] = trial, trial.started
        trial.started += 1
        trial.running += 1
        # With a pruner the next fold waits for this one's result.
        if self._prunes or trial.started == len(trial.jobs):
            self._waiting.popleft()
        return job

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Note an epoch; return whether the job should end, as its trial is unpromising."""
        trial, fold = self._of[job.name]
        if not self._scores[0].by_epoch:
            return False
        if record.epoch > len(trial.epochs.get(fold, {})) + 1:
            # The job resumed from a checkpoint.
            for earlier in self._history(job.name):
                if earlier.epoch < record.epoch:
                    self._hear(trial, fold, earlier)
        self._hear(trial, fold, record)
        return trial.pruned

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Note the end of a job: its trial continues with the next fold, or has a result."""
        trial, fold = self._of.pop(job.name)
        trial.running -= 1
        if outcome.state is JobState.STOPPED:
            return
        if outcome.state is JobState.FAILED or outcome.summary is None:
            trial.failed = True
        else:
            self._finished(trial, fold, job, outcome.summary)
        if trial.failed or trial.pruned:
            self._waiting = deque(one for one in self._waiting if one is not trial)
        elif trial.started < len(trial.jobs) and trial not in self._waiting:
            # Running trials finish before a new one begins.
            self._waiting.appendleft(trial)
        if trial.running == 0 and (trial.failed or trial.pruned or len(trial.ended) == len(trial.jobs)):
            self._end(trial)

    def _begin(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._waiting.append(_Trial(number, self._jobs(number, self._trials.options(number))))

    def _hear(self, trial: _Trial, fold: int, record: EpochRecord) -> None:
        """Note the value of an epoch once; report it if trials are compared by epochs."""
        known = trial.epochs.setdefault(fold, {})
        if trial.pruned or record.epoch in known:
            return
        known[record.epoch] = self._scores[0].at(record)
        if len(self._scores) > 1 or not (self._prunes or len(trial.jobs) == 1):
            return
        self._trials.report(trial.number, fold * self._span + record.epoch, _mean_at(trial, record.epoch))
        last = fold == len(trial.jobs) - 1 and record.epoch >= self._span
        trial.pruned = self._prunes and not last and self._trials.prunes(trial.number)
        if trial.pruned:
            # End it at once: a pruner decides only once, and this launch may be killed.
            self._trials.end(trial.number, PRUNED)

    def _finished(self, trial: _Trial, fold: int, job: FarmJob, summary: Summary) -> None:
        # Another launch may have ended the trial.
        trial.pruned |= self._trials.has_ended(trial.number)
        if self._scores[0].by_epoch and summary.epochs > len(trial.epochs.get(fold, {})):
            for record in self._history(job.name):
                self._hear(trial, fold, record)
        if not trial.pruned:
            trial.ended[fold] = [one.of(summary) for one in self._scores]

    def _end(self, trial: _Trial) -> None:
        if trial.failed:
            self._trials.end(trial.number, FAILED)
        elif not trial.pruned:
            folds = [trial.ended[fold] for fold in sorted(trial.ended)]
            values = [fmean(column) for column in zip(*folds, strict=True)]
            self._trials.end(trial.number, COMPLETE, values)


def _mean_at(trial: _Trial, epoch: int) -> float:
    """Return the mean over the folds at an epoch; a fold that ended earlier counts with its last value."""
    return fmean(values.get(epoch, values[max(values)]) for values in trial.epochs.values())
