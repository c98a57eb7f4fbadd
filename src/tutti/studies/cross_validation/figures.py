"""The figures of a cross-validation's page, as altair charts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any, Final

import altair as alt

from tutti.records.farm_folder import FarmFolder
from tutti.records.json_lines import read_lines
from tutti.records.usage import UsageRecord
from tutti.reports.figures.base import (
    BAR,
    TICKS,
    WIDTH,
    Data,
    amount,
    chart,
    coloured,
    number,
    pick,
    table,
    tips,
)
from tutti.reports.figures.classes import confusion_cells, confusion_pair
from tutti.reports.page import Drawn
from tutti.studies.cross_validation.result import CrossValidated
from tutti.studies.cross_validation.scores import best_first

SAMPLES: Final = 600
"""The most points of a line; neighbouring samples are averaged to keep this limit."""


def figures_of(folder: FarmFolder, result: CrossValidated) -> list[Drawn]:
    """Draw all figures that have data."""
    names, work = best_first(result.scores), list(_work(folder))
    busy = _busy(folder, work)
    drawn: list[Drawn] = []
    if names:
        drawn.append(Drawn("folds", "The score of each fold", _folds(result, names)))
    if work:
        drawn.append(Drawn("blocks", "Timeline of jobs", _blocks(work, names)))
    if busy:
        drawn.append(Drawn("cores", "How busy the cores were", _cores(busy)))
    if any(one.confusion for one in result.scores.values()):
        drawn.append(Drawn("confusion", "Confusion matrix", _confusion(result, names)))
    return drawn


def _work(folder: FarmFolder) -> Iterator[dict[str, Any]]:
    """Yield each job that ended, with its block and its time in seconds since the first one began."""
    began: dict[int, tuple[str, float]] = {}
    first: float | None = None
    for event in folder.events().records:
        first = event.time if first is None else first
        if event.event == "began":
            began[event.block] = event.job, event.time
        elif event.block in began:
            job, start = began.pop(event.block)
            yield {
                "block": event.block,
                "job": job,
                "candidate": job.rpartition("/")[0],
                "state": event.state,
                "from": start - first,
                "to": start - first + event.seconds,
                "began": start,
            }


def _folds(result: CrossValidated, names: list[str]) -> Any:
    """Draw a dot for each fold, and a line for the mean."""
    score = result.scores[names[0]].score
    form = ".2%" if score.is_share else ".4g"
    dots: Data = [
        {"candidate": name, "fold": f"fold {fold}", "score": value}
        for name in names
        for fold, value in enumerate(result.scores[name].folds)
    ]
    means: Data = [{"candidate": name, "score": result.scores[name].mean} for name in names]
    axis = alt.Axis(format="~%" if score.is_share else ".4~g", tickCount=TICKS)
    x = alt.X("score:Q", title=score.name, axis=axis, scale=alt.Scale(zero=False))
    y = alt.Y("candidate:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))
    shown = number("score", score.name, form)
    tick = alt.Chart(table(means)).mark_tick(thickness=2, size=BAR - 6, color="gray")
    dot = alt.Chart(table(dots)).mark_point(filled=True, size=60, opacity=0.7)
    layers = (
        tick.encode(x=x, y=y, tooltip=tips("candidate:N", shown)),
        dot.encode(x=x, y=y, tooltip=tips("candidate:N", "fold:N", shown)),
    )
    return alt.layer(*layers).properties(width=2 * WIDTH, height=alt.Step(BAR))


def _blocks(work: Data, names: list[str]) -> Any:
    order = [*names, *sorted({one["candidate"] for one in work} - {*names})]
    return chart(
        work,
        alt.MarkDef("bar", stroke="white", strokeWidth=0.5),
        coloured("candidate", order, work),
        wide=True,
        height=alt.Step(BAR),
        x=amount("from", "seconds since the beginning"),
        x2=alt.X2("to:Q"),
        y=alt.Y("block:O", title="block"),
        tooltip=["job:N", "state:N", number("from", "from, s"), number("to", "to, s")],
    ).add_params(pick("candidate"))


def _cores(rows: Data) -> Any:
    return chart(
        rows,
        alt.MarkDef("line", strokeWidth=1.5),
        coloured("core", dict.fromkeys(row["core"] for row in rows), rows),
        wide=True,
        x=amount("seconds", "seconds since the beginning"),
        y=alt.Y("busy:Q", title="busy, %"),
        tooltip=["core:N", number("seconds", "seconds"), number("busy", "busy, %")],
    ).add_params(pick("core"))


def _busy(folder: FarmFolder, work: Data) -> Data:
    """Return the load of each core over time."""
    first = min((one["began"] - one["from"] for one in work), default=0.0)
    read = [read_lines(file, UsageRecord).records for file in folder.usage] if work else []
    many = len({record.host for records in read for record in records}) > 1
    rows: Data = []
    for records in read:
        together = -(-len(records) // SAMPLES)
        parts = [records[at : at + together] for at in range(0, len(records), together)] if records else []
        for some in parts:
            host = f"{some[0].host}, " if many else ""
            for core, load in enumerate(zip(*(record.cores for record in some), strict=False)):
                seconds = mean(record.time for record in some) - first
                rows.append({"core": f"{host}core {core}", "seconds": seconds, "busy": mean(load)})
    return rows


def _confusion(result: CrossValidated, names: list[str]) -> Any:
    """Draw the matrices of the best and the last candidate."""
    cells = [confusion_cells(name, result.labels, result.scores[name].confusion or []) for name in names]
    order = dict.fromkeys(label for _, labels in cells for label in labels)
    rows = [row for found_rows, _ in cells for row in found_rows]
    return confusion_pair(rows, [*order], [names[0], names[-1]][: len(names)])
