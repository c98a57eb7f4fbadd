"""Loss and accuracy of a single run within its epochs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import altair as alt

from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.reports.figures.base import Data, Picture, chart, coloured, figure, in_rows, number, upwards
from tutti.reports.results import Results
from tutti.reports.runs import Run

FEWEST: Final = 3
"""The points below which epochs alone tell as much."""

TRAINING: Final = "training, of the epoch so far"
VALIDATION: Final = "validation, after an epoch"


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
