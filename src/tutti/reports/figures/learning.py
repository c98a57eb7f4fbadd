"""Metrics and loss of each way to train against time, and of a single run within its epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import altair as alt

from tutti.records.run import Evaluation
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
    repeated,
    table,
    upwards,
)
from tutti.reports.results import Results
from tutti.reports.runs import Run

MOST_METRICS: Final = 3
"""The metrics that are drawn beside the loss."""

FEWEST: Final = 3
"""The points below which epochs alone tell as much."""

TRAINING: Final = "training, of the epoch so far"
VALIDATION: Final = "validation, after an epoch"

_OF_PLACE: Final = ("way", "repeat", "epoch", "seconds")


@part("progress")
@figure(10, "Learning, against time and against epochs")
def progress(results: Results) -> Picture:
    """Metrics and loss against time and epochs: on the validation part, where there is one."""
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
    axes = {"seconds": alt.Axis()}
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
            x=alt.X(f"{x}:Q", title=x, axis=axis),
            y=upwards(data, y, f"{part} {y}"),
            detail=alt.Detail("repeat:N"),
            tooltip=["way:N", "repeat:N", "epoch:Q", *numbers],
        )
        for y in measures
        for x, axis in axes.items()
    ]
    return in_rows(panels, "way")


@part("time-to-target")
@figure(20, "Time to the target")
def to_target(results: Results) -> Picture:
    """Seconds until the target was reached: each repeat, and the median where all of them reached it."""
    target = results.comparison.target
    if target is None:
        return None

    def seconds(run: Run) -> list[float]:
        found = run.seconds_to(target)
        return [] if found is None else [found]

    title = f"seconds to {100 * target:g} % of the validation part right"
    return repeated(results, title, seconds, lambda row, _: row.to_target)


@part("within-epochs")
@figure(15, "Learning within the epochs")
def within_epochs(results: Results) -> Picture:
    """Loss and accuracy of a single run against its time: every few seconds, and after each epoch."""
    runs = [run for _, _, run in results.each()]
    if len(runs) != 1 or len(runs[0].points) < FEWEST:
        return None
    rows = [*_training(runs[0]), *_validation(runs[0])]
    measures = [name for name in ("accuracy", "loss") if any(name in row for row in rows)]
    colours = coloured("of", (TRAINING, VALIDATION), rows)
    panels = [_panel([row for row in rows if name in row], name, colours) for name in measures]
    return in_rows(panels, "of")


def _panel(rows: Data, name: str, colours: dict[str, object]) -> Picture:
    """Draw a line of what training saw, and dots of what validation did."""
    axes = {"x": alt.X("seconds:Q", title="seconds of training"), "y": upwards(rows, name, name)}
    numbers = ["of:N", "epoch:Q", number("seconds", "seconds"), number(name, name)]
    trained, validated = ([row for row in rows if row["of"] == of] for of in (TRAINING, VALIDATION))
    line = chart(trained, alt.MarkDef("line", strokeWidth=1.5), colours, tooltip=numbers, **axes)
    dots = chart(validated, alt.MarkDef("point", filled=True, size=60), colours, tooltip=numbers, **axes)
    return alt.layer(line, dots)


def _training(run: Run) -> Iterator[dict[str, object]]:
    """Yield loss and accuracy of the epoch so far, each at its time of training."""
    begins = [0.0, *accumulate(run.epoch_seconds)]
    for point in run.points:
        if point.epoch <= len(begins):
            yield _row(TRAINING, point.epoch, begins[point.epoch - 1] + point.seconds, point.train)


def _validation(run: Run) -> Iterator[dict[str, object]]:
    """Yield loss and accuracy on the validation part after each epoch, at the end of its training."""
    for record, seconds in zip(run.history, accumulate(run.epoch_seconds), strict=True):
        if record.validation is not None:
            yield _row(VALIDATION, record.epoch, seconds, record.validation)


def _row(of: str, epoch: int, seconds: float, found: Evaluation) -> dict[str, object]:
    metrics = {name: value for name, value in found.metrics.items() if name == "accuracy"}
    return {"of": of, "epoch": epoch, "seconds": round(seconds, 3), "loss": found.loss, **metrics}
