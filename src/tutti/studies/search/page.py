"""The page of a search: the best trials, all of them, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tutti.records.texts import metric_text
from tutti.reports.page import PAGE, drawing, write_page
from tutti.studies.search.study import Tuned


def write_tune_page(found: Tuned, page: Path | None = None) -> Path:
    """Write the page of a search and return it, with its figures beside it.

    Args:
        found: the search.
        page: its path; None: report.html in the farm.

    Raises:
        UserError: the packages that draw are not installed.
        BadRunFolder: it cannot be written.
    """
    with drawing():
        from tutti.studies.search.figures import figures_of
    return write_page(page or found.folder.path / PAGE, _words(found), figures_of(found))


def _words(found: Tuned) -> dict[str, Any]:
    aims, names = found.search.aims, list(found.search.space.dimensions)
    best = {trial.number for trial in found.best}
    rows = []
    for row in found.table():
        values = [row[str(aim)] for aim in aims]
        shown = [
            "" if value is None else metric_text(aim.name, value)
            for aim, value in zip(aims, values, strict=True)
        ]
        kind = "best" if row["trial"] in best else "failed" if row["state"] == "fail" else ""
        options = [_short(row[name]) for name in names]
        rows.append({"kind": kind, "cells": [row["trial"], row["state"], *shown, *options], "by": values[0]})
    higher = aims[0].higher
    rows.sort(key=lambda row: (row["by"] is None, -(row["by"] or 0) if higher else row["by"] or 0))
    verdict = ""
    if found.best:
        first = found.best[0]
        figures = (
            f"{aim.name} {metric_text(aim.name, value)}"
            for aim, value in zip(aims, first.values, strict=True)
        )
        verdict = f"Trial {first.number} is the best: {', '.join(figures)}"
    how = f"Sampler {found.search.sampler}, pruner {found.search.pruner}, seed {found.search.config.seed}."
    return {
        "title": f"Search for {found.search.config.model} on {found.search.config.data}",
        "verdict": verdict,
        "heads": ["trial", "state", *(aim.name for aim in aims), *names],
        "tables": [{"title": "All trials", "rows": rows}],
        "note": how,
        "lists": {},
        "failures": [(f"trial {number}", why) for number, why in found.failed().items()],
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
