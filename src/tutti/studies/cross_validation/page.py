"""The page of a cross-validation: the findings in words, tables and figures."""

from __future__ import annotations

from pathlib import Path

from tutti.records.farm_folder import FarmFolder
from tutti.reports.page import PAGE, drawing, write_page
from tutti.studies.cross_validation.result import CrossValidated


def write_cv_page(folder: FarmFolder, found: CrossValidated, page: Path | None = None) -> Path:
    """Write the page of a cross-validation and return it, with its figures beside it."""
    with drawing():
        from tutti.studies.cross_validation.figures import figures_of
    heads, rows = found.rows()
    kinds = ["best", *[""] * len(rows)]
    words = {
        "title": f"Cross-validation on {folder.plan.question['data']}",
        "verdict": f"{rows[0][0]} has the best mean: {rows[0][1]}" if rows else "",
        "heads": heads,
        "tables": [
            {
                "title": "Scores on what each fold holds out",
                "rows": [{"kind": kind, "cells": row} for kind, row in zip(kinds, rows, strict=False)],
            }
        ],
        "note": f"{found.left} jobs are yet to be done: 'tutti cv --resume' goes on." if found.left else "",
        "lists": {"Comparison": [one.sentence for one in found.comparison]},
        "failures": list(found.failed.items()),
    }
    return write_page(page or folder.path / PAGE, words, figures_of(folder, found))
