"""The page of a cross-validation: what came out, in words, tables and figures."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean
from typing import Any

from tutti.records.farm_folder import FarmFolder
from tutti.reports.page import PAGE, drawing, write_page
from tutti.studies.cross_validation.scores import measure_of
from tutti.studies.cross_validation.study import Findings, best_first


def write_cv_page(folder: FarmFolder, found: Findings, page: Path | None = None) -> Path:
    """Write the page of a cross-validation and return it, with its figures beside it.

    Args:
        folder: of the farm.
        found: in it.
        page: its path; None: report.html in the farm.

    Raises:
        UserError: the packages that draw are not installed.
        BadRunFolder: a file is damaged, or cannot be written.
    """
    with drawing():
        from tutti.studies.cross_validation.figures import figures_of
    return write_page(page or folder.path / PAGE, _words(folder, found), figures_of(folder, found))


def _words(folder: FarmFolder, found: Findings) -> dict[str, Any]:
    names, asked = best_first(found), folder.plan.question
    metric = found.scores[names[0]].metric if names else ""
    rows = []
    for at, name in enumerate(names):
        one, seconds = found.scores[name], found.seconds[name]
        cells = [name, *(shown(value, metric) for value in (one.mean, one.deviation, one.out_of_fold))]
        cells += [f"{len(one.known)} of {len(one.folds)}", f"{mean(seconds):.2f}" if seconds else ""]
        rows.append({"kind": "best" if at == 0 else "", "cells": cells})
    left = f"{found.left} jobs are yet to be done: 'tutti cv --resume' goes on." if found.left else ""
    return {
        "title": f"Cross-validation on {asked['data']}",
        "verdict": f"{names[0]} has the best mean: {shown(found.scores[names[0]].mean, metric)}"
        if names
        else "",
        "heads": ["candidate", metric, "standard deviation", "out of fold", "folds", "seconds each"],
        "tables": [{"title": "Scores on what each fold holds out", "rows": rows}],
        "note": left,
        "lists": {"What can be told": [one.sentence for one in found.differences]},
        "failures": list(found.failed.items()),
    }


def shown(value: float, metric: str) -> str:
    """Return a score as text; one that is missing as nothing."""
    if math.isnan(value):
        return ""
    return f"{value:.2%}" if measure_of(metric).share else f"{value:.4g}"
