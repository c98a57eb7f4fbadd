"""The page of a search: the best trials, all of them, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tutti.reports.page import PAGE, drawing, write_page
from tutti.studies.search.display import values_text
from tutti.studies.search.study import Tuned


def write_tune_page(found: Tuned, page: Path | None = None) -> Path:
    """Write the page of a search and return it, with its figures beside it."""
    with drawing():
        from tutti.studies.search.figures import figures_of
    search, best = found.search, found.front
    verdict = f"Trial {best[0].number} is the best: {values_text(found, best[0])}" if best else ""
    words = {
        "title": f"Search for {search.config.model} on {search.config.data}",
        "verdict": verdict,
        "heads": ["trial", "state", *(score.name for score in search.scores), *search.space.distributions],
        "tables": [{"title": "All trials", "rows": _rows(found)}],
        "note": f"Sampler {search.sampler}, pruner {search.pruner}, seed {search.config.seed}.",
        "lists": {},
        "failures": [(f"trial {number}", why) for number, why in found.failed.items()],
    }
    return write_page(page or found.folder / PAGE, words, figures_of(found))


def _rows(found: Tuned) -> list[dict[str, Any]]:
    """Return the rows of the table of all trials, the best first."""
    best, scores = {trial.number for trial in found.front}, found.search.scores
    first = str(scores[0])
    rows = sorted(
        found.trials,
        key=lambda row: (row[first] is None, (row[first] or 0) * (-1 if scores[0].higher else 1)),
    )
    shown = []
    for row in rows:
        values = [(score, row[str(score)]) for score in scores]
        cells = ["" if value is None else score.text(value) for score, value in values]
        options = [_short(row[name]) for name in found.search.space.distributions]
        kind = "best" if row["trial"] in best else "failed" if row["state"] == "fail" else ""
        shown.append({"kind": kind, "cells": [row["trial"], row["state"], *cells, *options]})
    return shown


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
