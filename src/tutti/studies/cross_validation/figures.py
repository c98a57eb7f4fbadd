"""The figures of a cross-validation's page, as altair charts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from statistics import mean
from typing import Any, Final

import altair as alt

from tutti.records.farm_folder import FarmFolder
from tutti.records.json_lines import read_lines
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.records.texts import duration
from tutti.records.usage import UsageRecord
from tutti.reports.figures.base import BAR, WIDTH, Data, amount, chart, coloured, number, pick, table, tips
from tutti.reports.figures.classes import confusion_matrix
from tutti.reports.page import Drawn
from tutti.studies.cross_validation.scores import measure_of
from tutti.studies.cross_validation.study import Findings, best_first

SAMPLES: Final = 600
"""The points of a line: of more samples some are left out."""


def figures_of(folder: FarmFolder, found: Findings) -> list[Drawn]:
    """Draw all figures for which there is something to draw.

    Args:
        folder: of the farm.
        found: in it.

    Raises:
        BadRunFolder: a file in it is damaged.
    """
    names, work = best_first(found), list(_work(folder))
    drawn: list[Drawn] = []
    if names:
        drawn.append(Drawn("folds", "The score of each fold", _folds(found, names)))
    if work:
        drawn.append(Drawn("blocks", "What each block did", _blocks(work, names), [speed_text(work)]))
        losses = [point for one in work for point in _losses(folder, one)]
        if losses:
            drawn.append(
                Drawn("losses", "Training loss against time", _lines(losses, "loss", "training loss"))
            )
    busy = _busy(folder, work)
    if busy:
        drawn.append(Drawn("cores", "How busy the cores were", _lines(busy, "busy", "busy, %", "core")))
    if any(one.per_class for one in found.scores.values()):
        drawn.append(Drawn("classes", "Accuracy of each class", _classes(found, names)))
        drawn.append(Drawn("confusion", "What was taken for what", _confusion(found, names)))
    return drawn


def speed_text(work: Data) -> str:
    """Say how much sooner the jobs were done than one after the other."""
    added, spent, reached = 0.0, 0.0, 0.0
    for one in sorted(work, key=lambda one: float(one["from"])):
        added += one["to"] - one["from"]
        # While no block worked, the farm had been interrupted.
        spent += max(0.0, one["to"] - max(reached, one["from"]))
        reached = max(reached, one["to"])
    return (
        f"The jobs took {duration(added)} added up, and {duration(spent)} by the clock: "
        f"{added / spent if spent else 1:.2f} at a time."
    )


def _work(folder: FarmFolder) -> Iterator[dict[str, Any]]:
    """Yield which block worked on which job, in seconds since the first began."""
    began: dict[int, tuple[str, float]] = {}
    first: float | None = None
    for event in folder.events().records:
        first = event.time if first is None else first
        if event.event == "began":
            began[event.block] = event.job, event.time
        elif event.block in began:
            job, start = began.pop(event.block)
            yield {
                "block": f"block {event.block}",
                "job": job,
                "candidate": job.rpartition("/")[0],
                "state": event.state,
                "from": start - first,
                "to": start - first + event.seconds,
                "began": start,
            }


def _folds(found: Findings, names: list[str]) -> Any:
    """A dot for each fold, and a line for the mean."""
    metric = found.scores[names[0]].metric
    form = ".2%" if measure_of(metric).share else ".4g"
    dots: Data = [
        {"candidate": name, "fold": f"fold {fold}", "score": score}
        for name in names
        for fold, score in enumerate(found.scores[name].folds)
        if score == score
    ]
    means: Data = [{"candidate": name, "score": found.scores[name].mean} for name in names]
    axis = alt.Axis(format="%") if measure_of(metric).share else alt.Axis()
    x = alt.X("score:Q", title=metric, axis=axis, scale=alt.Scale(zero=False))
    y = alt.Y("candidate:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))
    shown = number("score", metric, form)
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
        y=alt.Y("block:N", title=None),
        tooltip=["job:N", "state:N", number("from", "from, s"), number("to", "to, s")],
    ).add_params(pick("candidate"))


def _losses(folder: FarmFolder, one: dict[str, Any]) -> Data:
    """The training loss of each epoch of a job that has finished, at the time of its end."""
    if one["state"] != "finished":
        return []
    history = RunFolder(folder.job(one["job"])).lines(EpochRecord).records
    # The last epoch ends with the job, about.
    spent = list(accumulate(record.seconds["total"] for record in history))
    return [
        {
            "block": one["block"],
            "job": one["job"],
            "seconds": one["to"] - (spent[-1] - at),
            "loss": record.train.loss,
        }
        for record, at in zip(history, spent, strict=True)
    ]


def _lines(rows: Data, field: str, title: str, of: str = "block") -> Any:
    scale = alt.Scale(zero=field == "busy")
    return chart(
        rows,
        alt.MarkDef("line", strokeWidth=1.5, point=field == "loss"),
        coloured(of, sorted({row[of] for row in rows}), rows),
        wide=True,
        x=amount("seconds", "seconds since the beginning"),
        y=alt.Y(f"{field}:Q", title=title, scale=scale),
        detail=alt.Detail("job:N"),
        tooltip=["job:N", number("seconds", "seconds"), number(field, title)],
    ).add_params(pick(of))


def _busy(folder: FarmFolder, work: Data) -> Data:
    """The load of each core; several neighbouring samples of a long farm as one."""
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
                name = f"{host}core {core}"
                seconds = mean(record.time for record in some) - first
                rows.append({"core": name, "job": name, "seconds": seconds, "busy": mean(load)})
    return rows


def _labels(found: Findings, count: int) -> list[str]:
    return [found.labels[at] if at < len(found.labels) else str(at) for at in range(count)]


def _classes(found: Findings, names: list[str]) -> Any:
    rows: Data = [
        {"candidate": name, "class": label, "accuracy": share}
        for name in names
        for label, share in zip(
            _labels(found, len(found.scores[name].per_class)), found.scores[name].per_class, strict=True
        )
    ]
    return chart(
        rows,
        "bar",
        coloured("candidate", names, rows),
        wide=True,
        x=alt.X("class:O", sort=None, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("candidate:N", sort=None),
        y=alt.Y("accuracy:Q", axis=alt.Axis(format="%")),
        tooltip=["candidate:N", "class:O", number("accuracy", "accuracy", ".2%")],
    ).add_params(pick("candidate"))


def _confusion(found: Findings, names: list[str]) -> Any:
    """Two matrices: of the best candidate, and of another."""
    rows: Data = []
    order: list[str] = []
    for name in names:
        matrix = found.scores[name].confusion
        if matrix is None:
            continue
        order = max(order, _labels(found, len(matrix)), key=len)
        for label, counts in zip(_labels(found, len(matrix)), matrix.tolist(), strict=True):
            total = sum(counts)
            for taken, count in zip(order, counts, strict=False):
                if count:
                    cell = {"class": label, "taken for": taken, "samples": count, "share": count / total}
                    rows.append({"way": name, **cell})
    most = max(row["share"] for row in rows)
    ways = [*dict.fromkeys(row["way"] for row in rows)]
    sides = zip(("left", "right"), (ways[0], ways[-1])[: len(ways)], strict=False)
    return alt.hconcat(*(confusion_matrix(rows, side, way, ways, order, most) for side, way in sides))
