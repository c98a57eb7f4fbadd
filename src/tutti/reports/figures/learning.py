"""Metrics and loss of each way to train against time."""

from __future__ import annotations

import math
from typing import Final

import altair as alt

from tutti.registry import part
from tutti.reports.figures.base import (
    TICKS,
    Data,
    Picture,
    chart,
    coloured,
    figure,
    in_rows,
    names,
    number,
    table,
    upwards,
)
from tutti.reports.results import Results

MOST_METRICS: Final = 3
"""The most metrics that are drawn beside the loss."""

_OF_PLACE: Final = ("way", "repeat", "epoch", "seconds")


@part("progress")
@figure(10, "Learning, against time and against epochs")
def progress(results: Results) -> Picture:
    """Metrics and loss against time and epochs, on the validation part if there is one."""
    validated = any(run.validated for _, _, run in results.each())
    data: Data = []
    for row, repeat, run in results.each():
        seconds = 0.0
        for record, epochs, spent in zip(run.history, run.epochs, run.epoch_seconds, strict=True):
            seconds += spent
            found = record.validation if validated else record.train
            if found is not None:
                measured = {**found.metrics, "loss": found.loss}
                place = {"repeat": repeat + 1, "epoch": epochs, "seconds": round(seconds, 3)}
                data.append({"way": row.combination.name, **place, **measured})
    if not data:
        return None
    part = "validation" if validated else "training"
    named = dict.fromkeys(name for row in data for name in row if name not in _OF_PLACE)
    measures = [*[name for name in named if name != "loss"][:MOST_METRICS], "loss"]
    data = [{name: row.get(name) for name in (*_OF_PLACE, *measures)} for row in data]
    trained = [row["epoch"] for row in data if row["epoch"] is not None]
    axes = {"seconds": alt.Axis(tickCount=TICKS)}
    if trained:
        count = min(TICKS, math.ceil(max(trained)) - math.floor(min(trained)) or 1)
        axes["epoch"] = alt.Axis(format="d", tickCount=count)
    rows, line = table(data), alt.MarkDef("line", point=True, strokeWidth=1.5)
    numbers = [number(name, name) for name in ("seconds", *measures)]
    panels = [
        chart(
            rows,
            line,
            coloured("way", names(results), data),
            x=alt.X(f"{x}:Q", title=x, axis=axis, scale=alt.Scale(zero=x == "seconds")),
            y=upwards(data, y, f"{part} {y}"),
            detail=alt.Detail("repeat:N"),
            tooltip=["way:N", "repeat:N", "epoch:Q", *numbers],
        )
        for y in measures
        for x, axis in axes.items()
    ]
    return in_rows(panels, "way")
