"""The output of a search: progress, the best trials, and the importance of options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import optuna

from tutti.records.farm_folder import FarmFolder
from tutti.records.texts import printable
from tutti.reports.page import PAGE, require_drawing, write_page
from tutti.run.config import TrainConfig
from tutti.studies.farms import Blocks, farm_shown, print_times
from tutti.studies.search.study import Search, Tuned, tune
from tutti.studies.search.trials import JOURNAL
from tutti.tables import TextTable
from tutti.terminal import console_on

SHOWN: Final = 5
"""The most failures that are shown."""


def print_question(search: Search, trials: int, stream: IO[str]) -> None:
    """Print the space and the method of a search."""
    count = search.count(trials)
    folds = f" x {search.folds} folds" if search.folds > 1 else ""
    scores = " and ".join(f"{one.better} {one.name}" for one in search.scores)
    how = f"sampler {search.sampler}, pruner {search.pruner}"
    print(f"search: {count} trials{folds} for {scores}; {how}", file=stream)
    for name, written in search.space.written.items():
        print(f"  {printable(name)}: {printable(str(written))}", file=stream)
    stream.flush()


def tune_shown(
    search: Search,
    folder: FarmFolder,
    trials: int,
    blocks: Blocks,
    stream: IO[str],
    command: Callable[[TrainConfig], str] | None = None,
) -> Tuned:
    """Search, showing progress, and print the results as `print_findings` does."""
    print_question(search, trials, stream)
    jobs = [job for number in range(search.count(trials)) for job in search.job_names(number)]
    with farm_shown(folder, dict.fromkeys(jobs, search.span), stream) as hear:
        tuned = tune(search, folder, trials, blocks, hear)
    print_findings(tuned, stream, command)
    return tuned


def print_findings(
    tuned: Tuned, stream: IO[str], command: Callable[[TrainConfig], str] | None = None
) -> None:
    """Print the best trials, the importance of options, and the epochs that pruning saved.

    `command` spells the command that trains a configuration.
    """
    best, rows = tuned.front, tuned.trials
    counted = Counter("failed" if row["state"] == "fail" else row["state"] for row in rows)
    print(f"trials: {', '.join(f'{count} {state}' for state, count in sorted(counted.items()))}", file=stream)
    for number, why in [*tuned.failed.items()][:SHOWN]:
        print(f"trial {number} failed: {printable(why)}", file=stream)
    if len(best) > 1:
        console_on(stream).print(_front(tuned))
    if best:
        print(f"best: trial {best[0].number}, {values_text(tuned, best[0])}", file=stream)
        for name, value in tuned.best.items():
            print(f"  {printable(name)}: {printable(str(value))}", file=stream)
    if best and command is not None:
        print(f"to train it alone: {printable(command(tuned.config))}", file=stream)
    shares = ", ".join(f"{printable(name)} {share:.0%}" for name, share in tuned.importance.items())
    if shares:
        print(f"importance: {shares}", file=stream)
    trained, whole = tuned.epochs
    if tuned.search.pruner != "none" and whole:
        print(f"epochs: {trained} of {whole} trained, {1 - trained / whole:.0%} saved", file=stream)
    print_times(tuned.outcome, stream)
    print(f"study: {printable(str(tuned.folder / JOURNAL))}, trials: {tuned.write_table()}", file=stream)


def values_text(tuned: Tuned, trial: optuna.trial.FrozenTrial) -> str:
    """Return the objectives of a trial in words."""
    pairs = zip(tuned.search.scores, trial.values or [], strict=True)
    return ", ".join(f"{printable(score.name)} {score.text(value)}" for score, value in pairs)


def _front(tuned: Tuned) -> TextTable:
    """Return the table of the trials that no other trial beats in all objectives."""
    names, scores = list(tuned.search.space.distributions), tuned.search.scores
    heads = ("trial", *(score.name for score in scores), *names)
    table = TextTable(heads, drop=names[::-1], title="best trials")
    for trial in tuned.front:
        figures = [score.text(value) for score, value in zip(scores, trial.values, strict=True)]
        options = tuned.search.space.options(trial.params)
        table.add_row(str(trial.number), *figures, *(str(options[name]) for name in names))
    return table


def write_tune_page(tuned: Tuned, page: Path | None = None) -> Path:
    """Write the page of a search, with the figures in a folder beside it; return its path."""
    require_drawing()
    from tutti.studies.search.figures import figures_of

    search, best = tuned.search, tuned.front
    verdict = f"Trial {best[0].number} is the best: {values_text(tuned, best[0])}" if best else ""
    heads = ["trial", "state", *(score.name for score in search.scores), *search.space.distributions]
    words = {
        "title": f"Search for {search.config.model} on {search.config.data}",
        "verdict": verdict,
        "tables": [{"title": "All trials", "heads": heads, "rows": _rows(tuned)}],
        "note": f"Sampler {search.sampler}, pruner {search.pruner}, seed {search.config.seed}.",
        "lists": {},
        "failures": [(f"trial {number}", why) for number, why in tuned.failed.items()],
    }
    return write_page(page or tuned.folder / PAGE, words, figures_of(tuned))


def _rows(tuned: Tuned) -> list[dict[str, Any]]:
    """Return the rows of the table of all trials, the best first."""
    best, scores = {trial.number for trial in tuned.front}, tuned.search.scores
    first, sign = str(scores[0]), -1 if scores[0].higher else 1
    shown = []
    for row in sorted(tuned.trials, key=lambda row: (row[first] is None, sign * (row[first] or 0))):
        values = [(score, row[str(score)]) for score in scores]
        cells = ["" if value is None else score.text(value) for score, value in values]
        options = [_short(row[name]) for name in tuned.search.space.distributions]
        kind = "best" if row["trial"] in best else "failed" if row["state"] == "fail" else ""
        shown.append({"kind": kind, "cells": [row["trial"], row["state"], *cells, *options]})
    return shown


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
