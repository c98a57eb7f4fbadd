"""The course of a run as a table and as a picture: its figures by epoch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Final

from tutti.load_object import optional_package
from tutti.records.run import EpochRecord
from tutti.training.loggers import figures_of

WIDTH: Final = 320
"""Pixels of a panel."""


def frame(history: Sequence[EpochRecord]) -> Any:
    """Return a data frame with a row for each epoch; a list of dicts where pandas is not installed."""
    rows = [figures_of(record) for record in history]
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError:
        return rows
    return pandas.DataFrame(rows)


def curves(history: Sequence[EpochRecord]) -> Any:
    """Draw a panel for the loss and for each metric, of training and validation, against the epochs.

    Returns:
        A chart of altair.
    """
    alt = optional_package("altair", "plots", extra="plots")
    data = [
        {"epoch": record.epoch, "part": part, "figure": name, "value": value}
        for record in history
        for part, found in (("training", record.train), ("validation", record.validation))
        if found is not None
        for name, value in {"loss": found.loss, **found.metrics}.items()
        if math.isfinite(value)
    ]
    # More ticks than epochs would stand between them, where labels are rounded.
    ticks = max(1, min(WIDTH // 40, len(history) - 1))
    panels = [
        alt.Chart(alt.Data(values=[row for row in data if row["figure"] == name]))
        .mark_line(point=True)
        .encode(
            x=alt.X("epoch:Q", axis=alt.Axis(format="d", tickCount=ticks)),
            y=alt.Y("value:Q", title=name, scale=alt.Scale(zero=False)),
            color=alt.Color("part:N", title=None),
            tooltip=["part:N", "epoch:Q", alt.Tooltip("value:Q", title=name, format=".4~g")],
        )
        .properties(width=WIDTH)
        for name in dict.fromkeys(row["figure"] for row in data)
    ]
    return alt.concat(*panels, columns=2)
