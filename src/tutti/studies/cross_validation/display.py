"""The output of a cross-validation: jobs, progress, scores and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tutti.farm.coordinator import FarmOutcome
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import ERROR
from tutti.records.splits import Split
from tutti.records.texts import printable
from tutti.reports.page import PAGE, require_drawing, write_page
from tutti.studies.cross_validation.result import COMPARISON, SCORES, CrossValidated
from tutti.studies.cross_validation.study import CrossValidation
from tutti.studies.farms import Blocks, farm_shown, print_times
from tutti.watching.farm import known_jobs


def print_jobs(question: CrossValidation, splits: Sequence[Split], stream: IO[str]) -> None:
    """Print the number of jobs and of samples in each fold, and the candidates."""
    print(_counted(len(question.candidates), len(splits)), file=stream)
    for number, split in enumerate(splits):
        trained, held_out = len(split.train), len(split.test)
        print(f"fold {number}: {trained:,} samples to train on, {held_out:,} held out", file=stream)
    for name in question.candidates:
        print(printable(name), file=stream)


def _counted(candidates: int, folds: int) -> str:
    plural = "" if candidates == 1 else "s"
    return f"{candidates * folds} jobs: {candidates} candidate{plural} x {folds} folds"


def train_shown(
    question: CrossValidation, folder: FarmFolder, blocks: Blocks, stream: IO[str]
) -> tuple[FarmOutcome, CrossValidated]:
    """Train all folds, showing progress and results, and write the tables."""
    jobs, count = known_jobs(folder), len(question.candidates)
    print(_counted(count, len(jobs) // count), file=stream, flush=True)
    with farm_shown(folder, jobs, stream) as hear:
        outcome = question.train(folder, blocks, hear)
    result = CrossValidated.read(folder)
    result.write_tables()
    print_findings(result, folder, stream)
    print_times(outcome, stream)
    print(f"scores: {folder.path / SCORES}, comparison: {folder.path / COMPARISON}", file=stream)
    return outcome, result


def print_findings(result: CrossValidated, folder: FarmFolder, stream: IO[str]) -> None:
    """Print the scores, the significant differences, and the failed jobs with the reasons."""
    result.print_to(stream)
    alike: dict[tuple[str, str], list[str]] = {}
    for job, why in result.failed.items():
        alike.setdefault((job.rpartition("/")[0], why), []).append(job)
    for (candidate, why), jobs in alike.items():
        count = f"{len(jobs)} jobs" if len(jobs) > 1 else "a job"
        where = folder.job(jobs[0]) / ERROR
        print(f"{count} of {printable(candidate)} failed: {printable(why)}; see {where}", file=stream)


def write_cv_page(folder: FarmFolder, result: CrossValidated, page: Path | None = None) -> Path:
    """Write the page of a cross-validation, with the figures in a folder beside it; return its path."""
    require_drawing()
    from tutti.studies.cross_validation.figures import figures_of

    heads, cells = result.rows()
    ties = result.ties if cells else []
    rows = [{"kind": "best" if row[0] in ties else "", "cells": row} for row in cells]
    words = {
        "title": f"Cross-validation on {folder.plan.question['data']}",
        "verdict": result.verdict,
        "tables": [{"title": "Scores on the held-out samples", "heads": heads, "rows": rows}],
        "note": f"{result.left} jobs are left; 'tutti cv --resume' continues." if result.left else "",
        "lists": {"Differences between candidates": [one.sentence for one in result.comparison]},
        "failures": list(result.failed.items()),
    }
    return write_page(page or folder.path / PAGE, words, figures_of(folder, result))
