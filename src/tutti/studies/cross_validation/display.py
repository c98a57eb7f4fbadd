"""The words of a cross-validation: its jobs, how they go on, its scores and what they tell."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import IO, Final

from tutti.farm.coordinator import FarmOutcome
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import ERROR
from tutti.records.texts import duration
from tutti.records.untrusted import printable
from tutti.studies.blocks import Blocks
from tutti.studies.cross_validation.page import shown
from tutti.studies.cross_validation.significance import none_told
from tutti.studies.cross_validation.study import (
    COMPARISON,
    SCORES,
    CrossValidation,
    Findings,
    Plan,
    best_first,
    train_folds,
)
from tutti.studies.showing import farm_shown
from tutti.tables import TextTable
from tutti.terminal import console_on
from tutti.watching.farm import known_jobs

MANY: Final = 6
"""The number of comparisons above which only those with the best candidate are shown."""


def print_jobs(plan: Plan, stream: IO[str]) -> None:
    """Print the jobs, and how many samples each fold has."""
    jobs = [job for jobs in plan.question.jobs(len(plan.splits)).values() for job in jobs]
    print(
        f"{len(jobs)} jobs: {len(plan.question.contenders)} candidates x {len(plan.splits)} folds",
        file=stream,
    )
    for number, split in enumerate(plan.splits):
        print(
            f"fold {number}: {len(split.train):,} samples to train on, {len(split.test):,} held out",
            file=stream,
        )
    for job in jobs:
        print(printable(job.name), file=stream)


def train_shown(
    question: CrossValidation, folder: FarmFolder, blocks: Blocks, stream: IO[str]
) -> FarmOutcome:
    """Train all folds, and show how that goes."""
    with farm_shown(folder, known_jobs(folder), stream) as hear:
        return train_folds(question, folder, blocks, hear)


def print_scores(found: Findings, stream: IO[str]) -> None:
    """Print the scores, and what they tell."""
    console = console_on(stream)
    if found.scores:
        console.print(score_table(found))
    shown = found.differences
    if len(shown) > 1 and not any(one.told or one.why for one in shown):
        print(printable(none_told(shown)), file=stream)
        return
    if len(shown) > MANY:
        best = best_first(found)[0]
        shown = [one for one in shown if best in (one.first, one.second)]
    for one in shown:
        print(printable(one.sentence), file=stream)
    if len(shown) < len(found.differences):
        print(f"{len(found.differences) - len(shown)} further comparisons are in {COMPARISON}", file=stream)


def print_findings(found: Findings, folder: FarmFolder, outcome: FarmOutcome, stream: IO[str]) -> None:
    """Print the scores, what they tell, what has failed, and how long it took."""
    print_scores(found, stream)
    print_failures(found, folder, stream)
    if outcome.seconds > 0 and outcome.busy_s > 0:
        times = outcome.busy_s / outcome.seconds
        print(
            f"the jobs took {duration(outcome.busy_s)} added up, and {duration(outcome.seconds)} by the "
            f"clock on {outcome.blocks} block{'' if outcome.blocks == 1 else 's'}: {times:.2f} at a time",
            file=stream,
        )
    print(f"scores: {folder.path / SCORES}, comparison: {folder.path / COMPARISON}", file=stream)


def print_failures(found: Findings, folder: FarmFolder, stream: IO[str]) -> None:
    """Print which jobs have failed, and why."""
    for (candidate, why), jobs in _alike(found.failed).items():
        count = f"{len(jobs)} jobs" if len(jobs) > 1 else "a job"
        print(
            f"{count} of {printable(candidate)} failed: {printable(why)}; see {folder.job(jobs[0]) / ERROR}",
            file=stream,
        )


def _alike(failed: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Return the jobs of each candidate that have failed for the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for job, why in failed.items():
        found.setdefault((job.rpartition("/")[0], why), []).append(job)
    return found


def score_table(found: Findings) -> TextTable:
    """Return the table of scores, the best candidate first."""
    names = best_first(found)
    metric = found.scores[names[0]].metric
    heads = ("candidate", metric, "deviation", "out of fold", "folds", "seconds each")
    table = TextTable(heads)
    for name in names:
        one, seconds = found.scores[name], found.seconds[name]
        cells = [shown(value, one.metric) for value in (one.mean, one.deviation, one.out_of_fold)]
        folds = f"{len(one.known)}" if not one.missing else f"{len(one.known)} of {len(one.folds)}"
        table.add_row(name, *cells, folds, f"{mean(seconds):.2f}" if seconds else "")
    return table
