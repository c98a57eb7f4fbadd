"""The figures of a comparison, as altair charts, from its runs' records.

Every figure is drawn from one table: a list of dicts, one for each mark. `FIGURES` has them in the order of
the page. Colours follow the way to train, in all figures alike; a click on the legend picks one out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import altair as alt

from tutti.comparisons import Comparison
from tutti.records import STAGES, EpochRecord
from tutti.reports.runs import Run
from tutti.reports.scaling import Row

WIDTH: Final = 420
HEIGHT: Final = 260

PICK: Final = alt.selection_point(name="picked", fields=["way"], bind="legend")
"""A click on the legend picks out a way to train; with shift, several. The first panel has it for all."""

Data = list[dict[str, Any]]

Picture = Any
"""A chart of altair, alone or composed of several; None where there is nothing to draw."""


@dataclass(frozen=True)
class Results:
    """What a comparison has found.

    Attributes:
        comparison: what was compared.
        rows: one for each combination.
        runs: the finished runs of each, by the combination's folder.
    """

    comparison: Comparison
    rows: Sequence[Row]
    runs: Mapping[str, Sequence[Run]]

    def epochs(self) -> Iterator[tuple[str, int, float, EpochRecord]]:
        """Each epoch of each run: the way to train, the repeat, seconds of training so far, the record."""
        for row in self.rows:
            for repeat, run in enumerate(self.runs[row.combination.folder]):
                seconds = 0.0
                for record in run.history:
                    seconds += record.seconds["total"] - record.seconds["validation"]
                    yield row.combination.name, repeat, seconds, record


def progress(results: Results) -> Picture:
    """Accuracy and loss on the validation part, against time and against epochs."""
    data: Data = []
    for way, repeat, seconds, record in results.epochs():
        if record.validation is not None:
            accuracy = record.validation.metrics.get("accuracy")
            data.append(
                {
                    "way": way,
                    "repeat": repeat,
                    "seconds": round(seconds, 3),
                    "epoch": record.epoch,
                    "accuracy": accuracy,
                    "loss": record.validation.loss,
                }
            )
    if not data:
        return None
    base = alt.Chart(_table(data)).mark_line(point=True)
    panels = [
        base.encode(
            x=alt.X(f"{x}:Q", title=x, axis=axis),
            y=alt.Y(f"{y}:Q", title=f"validation {y}", scale=alt.Scale(zero=False)),
            detail="repeat:N",
            **_ways(),
            tooltip=["way:N", "repeat:N", "epoch:Q", "seconds:Q", "accuracy:Q", "loss:Q"],
        ).properties(width=WIDTH, height=HEIGHT)
        for y in ("accuracy", "loss")
        for x, axis in (("seconds", alt.Axis()), ("epoch", alt.Axis(tickMinStep=1)))
    ]
    return _in_rows([panels[0].add_params(PICK), *panels[1:]])


def speed_up(results: Results) -> Picture:
    """Speed-up over one process with one thread, against cores, beside the ideal."""
    data: Data = [
        {
            "way": row.combination.strategy,
            "scaling": f"{row.combination.scaling} scaling",
            "name": row.combination.name,
            "cores": row.combination.cores,
            "speed-up": row.speed_up,
            "efficiency": row.efficiency,
        }
        for row in results.rows
        if row.speed_up is not None
    ]
    if not data:
        return None
    ideal = [
        {"cores": cores, "speed-up": cores, "scaling": scaling}
        for cores in sorted({row["cores"] for row in data})
        for scaling in sorted({row["scaling"] for row in data})
    ]
    axes = {"x": alt.X("cores:Q", axis=alt.Axis(tickMinStep=1)), "y": alt.Y("speed-up:Q")}
    line = alt.Chart(_table(ideal)).mark_line(strokeDash=[4, 4], color="gray").encode(**axes)
    found = (
        alt.Chart(_table(data))
        .mark_line(point=alt.OverlayMarkDef(size=80))
        .encode(**axes, **_ways(), tooltip=["name:N", "cores:Q", "speed-up:Q", "efficiency:Q"])
    )
    panels: list[Any] = []
    for scaling in sorted({row["scaling"] for row in data}):
        marks = found.transform_filter(alt.datum.scaling == scaling)
        one = alt.layer(
            line.transform_filter(alt.datum.scaling == scaling),
            marks if panels else marks.add_params(PICK),
        )
        panels.append(one.properties(width=WIDTH, height=HEIGHT, title=f"{scaling}; dashed: ideal"))
    return _in_rows(panels)


def throughput(results: Results) -> Picture:
    """Training samples per second of each repeat, and their median."""
    data: Data = [
        {"way": row.combination.name, "repeat": repeat, "samples/s": run.samples_per_s}
        for row in results.rows
        for repeat, run in enumerate(results.runs[row.combination.folder])
    ]
    if not data:
        return None
    base = alt.Chart(_table(data)).encode(y=alt.Y("way:N", sort=None, title=None))
    bars = base.mark_bar().encode(x=alt.X("median(samples/s):Q", title="samples/s"), **_ways(legend=False))
    ticks = base.mark_tick(thickness=2).encode(x="samples/s:Q", tooltip=["way:N", "repeat:N", "samples/s:Q"])
    return alt.layer(bars, ticks).properties(width=2 * WIDTH)


def stages(results: Results) -> Picture:
    """Where the time of all ranks went: a bar for each way to train, the median of the repeats."""
    data: Data = []
    for row in results.rows:
        found = [run.stages for run in results.runs[row.combination.folder]]
        for place, stage in enumerate(STAGES):
            if any(stages[stage] for stages in found):
                seconds = median(stages[stage] for stages in found)
                way = row.combination.name
                data.append({"way": way, "stage": stage, "seconds": seconds, "place": place})
    if not data:
        return None
    return (
        alt.Chart(_table(data))
        .mark_bar()
        .encode(
            x=alt.X("sum(seconds):Q", title="seconds, summed over the ranks"),
            y=alt.Y("way:N", sort=None, title=None),
            color=alt.Color("stage:N", sort=list(STAGES)),
            order=alt.Order("place:Q"),
            tooltip=["way:N", "stage:N", "seconds:Q"],
        )
        .properties(width=2 * WIDTH)
    )


def trade(results: Results) -> Picture:
    """Accuracy against throughput: the upper right corner is the best."""
    data: Data = [
        {
            "way": row.combination.name,
            "samples/s": row.samples_per_s,
            "accuracy": row.accuracy,
            "seconds": row.seconds,
        }
        for row in results.rows
        if row.accuracy is not None
    ]
    if not data:
        return None
    return (
        alt.Chart(_table(data))
        .mark_point(filled=True, size=120)
        .encode(
            x=alt.X("samples/s:Q"),
            y=alt.Y("accuracy:Q", scale=alt.Scale(zero=False)),
            **_ways(),
            tooltip=["way:N", "samples/s:Q", "accuracy:Q", "seconds:Q"],
        )
        .properties(width=WIDTH, height=HEIGHT)
        .add_params(PICK)
    )


def classes(results: Results) -> Picture:
    """The accuracy of every class on the test part, of each way to train: the first repeat."""
    data: Data = []
    for row in results.rows:
        for run in results.runs[row.combination.folder][:1]:
            test = run.summary.test if run.summary is not None else None
            for number, accuracy in enumerate(test.class_accuracy() if test is not None else []):
                data.append({"way": row.combination.name, "class": number, "accuracy": accuracy})
    if not data:
        return None
    return (
        alt.Chart(_table(data))
        .mark_bar()
        .encode(
            x=alt.X("class:O", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("accuracy:Q"),
            xOffset="way:N",
            **_ways(),
            tooltip=["way:N", "class:O", "accuracy:Q"],
        )
        .properties(width=2 * WIDTH, height=HEIGHT)
        .add_params(PICK)
    )


Figure = Callable[[Results], Picture]

FIGURES: Final[dict[str, tuple[str, Figure]]] = {
    "progress": ("Learning, against time and against epochs", progress),
    "speed-up": ("Speed-up", speed_up),
    "throughput": ("Throughput", throughput),
    "stages": ("Where the time went", stages),
    "trade": ("Accuracy against throughput", trade),
    "classes": ("Accuracy of each class", classes),
}
"""By the name of its file: the title, and what draws it; None where the runs have nothing to draw."""


def _table(rows: Data) -> Any:
    return alt.Data(values=rows)  # type: ignore[no-untyped-call]


def _ways(legend: bool = True) -> dict[str, Any]:
    """Colour and opacity by the way to train."""
    colour = alt.Color("way:N", sort=None, title=None, legend=alt.Legend() if legend else None)
    if not legend:
        return {"color": colour}
    return {"color": colour, "opacity": alt.condition(PICK, alt.value(1.0), alt.value(0.12))}


def _in_rows(panels: Sequence[Any], columns: int = 2) -> Any:
    rows = [alt.hconcat(*panels[at : at + columns]) for at in range(0, len(panels), columns)]
    return alt.vconcat(*rows) if len(rows) > 1 else rows[0]
