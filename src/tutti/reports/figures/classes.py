"""The accuracy of each class, and the confusion of classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.reports.figures.base import Data, Picture, figure, number, side_by_side, table, tips
from tutti.reports.results import Results

SIDE = 340
"""The width of a confusion matrix in pixels."""

COUNTED = 15
"""Up to this number of classes the cells show their numbers of samples."""

NO_CLASS = "no class"


@part("classes")
@figure(140, "Accuracy of each class")
def accuracies(results: Results) -> Picture:
    """The accuracy of each class on the test part, for the first repeat of each way to train."""
    data: Data = [
        {"way": way, "class": _label(labels, number), "accuracy": accuracy}
        for way, labels, test in _tests(results)
        for number, accuracy in enumerate(test.class_accuracy())
    ]
    return side_by_side(
        results,
        data,
        alt.MarkDef("point", filled=True, size=60),
        x=alt.X("true class:O", sort=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("accuracy:Q", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False)),
        tooltip=["way:N", "true class:O", number("accuracy", "accuracy", ".2%")],
    )


@part("confusion")
@figure(150, "Confusion matrix")
def confusion(results: Results) -> Picture:
    """Test samples of each class by the predicted class: one process beside the most accurate others.

    Two matrices of the ways that are chosen below them: the first repeat. Empty cells are left out.
    """
    data, order = _confused(results)
    chosen = [row.combination.name for row in results.pair(lambda row: row.accuracy)]
    return confusion_pair(data, order, chosen)


def confusion_pair(data: Data, order: list[str], chosen: Sequence[str]) -> Picture:
    """Draw two matrices side by side, at first for the chosen ways; None without cells."""
    ways = [*dict.fromkeys(row["way"] for row in data)]
    if not ways:
        return None
    first = [way for way in chosen if way in ways] or ways[:1]
    most = max(row["share"] for row in data)
    sides = zip(("left", "right"), first, strict=False)
    return alt.hconcat(*(_confusion_matrix(data, side, way, ways, order, most) for side, way in sides))


def _confusion_matrix(data: Data, side: str, way: str, ways: list[str], order: list[str], most: float) -> Any:
    """Draw the cells of a way that is chosen below, `way` at first; `order` is for the classes."""
    choice = alt.param(name=side, value=way, bind=alt.binding_select(options=ways, name=f"{side} matrix: "))
    scale = alt.Scale(scheme="viridis", type="sqrt", domain=[0, most])
    room = SIDE / len(order)
    # Letters are 7 pixels wide.
    turned = alt.Axis(labelAngle=0 if 7 * max(map(len, order)) < room else -45)
    base = alt.Chart(table(data)).encode(
        # Also classes without samples.
        x=alt.X("predicted as:O", scale=alt.Scale(domain=order), axis=turned),
        y=alt.Y("true class:O", scale=alt.Scale(domain=[one for one in order if one != NO_CLASS])),
    )
    cells = base.mark_rect().encode(
        color=alt.Color("share:Q", title="share of class", scale=scale, legend=alt.Legend(format="%")),
        tooltip=[
            *tips("way:N", "true class:O", "predicted as:O", "samples:Q"),
            number("share", "share", ".2%"),
        ],
    )
    ink = alt.condition(alt.datum.share > 0.4 * most, alt.value("black"), alt.value("white"))
    counts = base.mark_text(fontSize=min(13, room / 3.2)).encode(text="samples:Q", color=ink)
    return (
        alt.layer(*([cells, counts] if len(order) <= COUNTED else [cells]))
        .transform_filter(f"datum.way === {side}")
        .properties(width=SIDE, height=SIDE, title=alt.TitleParams(text=alt.ExprRef(expr=side)))
        .add_params(choice)
    )


def confusion_cells(way: str, labels: tuple[str, ...], matrix: list[list[float]]) -> tuple[Data, list[str]]:
    """Return the cells with samples, and the names of the classes in order."""
    data: Data = []
    order: dict[str, None] = {}
    for actual, row in enumerate(matrix):
        for taken, count in enumerate(row):
            found = _label(labels, taken) if taken < len(matrix) else NO_CLASS
            order[found] = None
            if count:
                cell = {"true class": _label(labels, actual), "predicted as": found, "samples": count}
                data.append({"way": way, **cell, "share": count / sum(row)})
    return data, [*order]


def _confused(results: Results) -> tuple[Data, list[str]]:
    """Return the cells of all ways to train, and the names of the classes in order."""
    found = [confusion_cells(way, labels, test.confusion or []) for way, labels, test in _tests(results)]
    order = dict.fromkeys(name for _, names in found for name in names)
    return [row for rows, _ in found for row in rows], [*order]


def _tests(results: Results) -> Iterator[tuple[str, tuple[str, ...], Evaluation]]:
    """Yield the way, the names of the classes and the evaluation on the test part of each first repeat."""
    for row, repeat, run in results.each():
        if repeat == 0 and run.summary is not None and run.summary.test is not None:
            yield row.combination.name, run.labels, run.summary.test


def _label(labels: tuple[str, ...], number: int) -> str:
    return labels[number] if number < len(labels) else str(number)
