"""The words of a cross-validation: its jobs, how they go on, its scores and what they tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import IO, Final

from tutti.farm.coordinator import FarmOutcome
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import ERROR
from tutti.records.splits import Split
from tutti.records.untrusted import printable
from tutti.studies.cross_validation.scores import best_first
from tutti.studies.cross_validation.study import (
    COMPARISON,
    SCORES,
    CrossValidated,
    CrossValidation,
)
from tutti.studies.farms import Blocks, farm_shown, print_times
from tutti.tables import TextTable
from tutti.terminal import console_on
from tutti.watching.farm import known_jobs

MANY: Final = 6
"""The number of comparisons above which only those with the best candidate are shown."""


def print_jobs(question: CrossValidation, splits: Sequence[Split], stream: IO[str]) -> None:
    """Print the jobs, and how many samples each fold has."""
    count = len(question.candidates)
    print(f"{count * len(splits)} jobs: {count} candidates x {len(splits)} folds", file=stream)
    for number, split in enumerate(splits):
        trained, held_out = len(split.train), len(split.test)
        print(f"fold {number}: {trained:,} samples to train on, {held_out:,} held out", file=stream)
    for name in question.candidates:
        print(printable(name), file=stream)


def train_shown(
    question: CrossValidation, folder: FarmFolder, blocks: Blocks, stream: IO[str]
) -> tuple[FarmOutcome, CrossValidated]:
    """Train all folds, show how that goes and what came out, and write the tables."""
    with farm_shown(folder, known_jobs(folder), stream) as hear:
        outcome = question.train(folder, blocks, hear)
    found = CrossValidated.read(folder)
    found.write_tables()
    print_findings(found, folder, stream)
    print_times(outcome, stream)
    print(f"scores: {folder.path / SCORES}, comparison: {folder.path / COMPARISON}", file=stream)
    return outcome, found


def print_scores(found: CrossValidated, stream: IO[str]) -> None:
    """Print the scores, and which differences are significant."""
    heads, rows = score_rows(found)
    table = TextTable(heads)
    for row in rows:
        table.add_row(*row)
    if rows:
        console_on(stream).print(table)
    shown = found.comparison
    if len(shown) > MANY:
        best = best_first(found.scores)[0]
        shown = [one for one in shown if best in (one.first, one.second)]
    for one in shown:
        print(printable(one.sentence), file=stream)
    if len(shown) < len(found.comparison):
        print(f"{len(found.comparison) - len(shown)} further comparisons are in {COMPARISON}", file=stream)


def print_findings(found: CrossValidated, folder: FarmFolder, stream: IO[str]) -> None:
    """Print the scores, which differences are significant, and which jobs have failed, and why."""
    print_scores(found, stream)
    alike: dict[tuple[str, str], list[str]] = {}
    for job, why in found.failed.items():
        alike.setdefault((job.rpartition("/")[0], why), []).append(job)
    for (candidate, why), jobs in alike.items():
        count = f"{len(jobs)} jobs" if len(jobs) > 1 else "a job"
        where = folder.job(jobs[0]) / ERROR
        print(f"{count} of {printable(candidate)} failed: {printable(why)}; see {where}", file=stream)


def score_rows(found: CrossValidated) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table of scores, the best candidate first."""
    names = best_first(found.scores)
    metric = str(found.scores[names[0]].score) if names else ""
    rows = []
    for name in names:
        one = found.scores[name]
        folds = f"{len(one.known)} of {len(one.folds)}" if one.missing else f"{len(one.folds)}"
        seconds = "" if math.isnan(one.seconds_each) else f"{one.seconds_each:.2f}"
        rows.append([name, one.score.text(one.mean), one.score.text(one.deviation), folds, seconds])
    return ["candidate", metric, "deviation", "folds", "seconds each"], rows
