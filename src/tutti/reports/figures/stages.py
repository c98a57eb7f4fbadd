"""The seconds of each stage, a step of a pipeline, and the staleness of exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import altair as alt

from tutti.records.pipeline import KINDS, PipelineRecord
from tutti.records.run import STAGES
from tutti.registry import part
from tutti.reports.advice import where_the_time_went
from tutti.reports.figures.base import (
    WIDTH,
    Data,
    Picture,
    amount,
    coloured,
    figure,
    in_rows,
    number,
    side_by_side,
    stacked,
    table,
    tips,
)
from tutti.reports.results import Results

LANE = 34
"""Pixels from one rank to the next."""


def advised(results: Results) -> list[str]:
    """Advise each way to train, from its seconds by stage."""
    found = []
    for row in results.rows:
        runs = results.runs[row.combination.folder]
        history = [record for run in runs for record in run.history]
        # Of a way that has failed there are no runs.
        if runs and (said := where_the_time_went(history, runs[0].config, runs[0].strategy)):
            found.append(f"{row.combination.name}: {said}")
    return found


@part("stages")
@figure(80, "Where the time went", advised)
def stages(results: Results) -> Picture:
    """The seconds of each stage, summed over the ranks and of each rank: medians of the repeats."""
    summed: Data = []
    single: Data = []
    for row in results.rows:
        way, runs = row.combination.name, results.runs[row.combination.folder]
        summed += _shares(way, [run.stages for run in runs])
        for rank in range(max((len(run.rank_stages) for run in runs), default=0)):
            of_rank = [run.rank_stages[rank] for run in runs if rank < len(run.rank_stages)]
            single += _shares(f"{way}: rank {rank}", of_rank)
    if not summed:
        return None
    tooltip = ["way:N", "stage:N", number("seconds", "seconds"), number("share", "share", ".1%")]
    panels = [
        stacked(data, "stage", STAGES, amount("seconds", f"seconds, {title}"), tooltip)
        for data, title in ((summed, "summed over the ranks"), (single, "of each rank"))
    ]
    return in_rows(panels, "stage", columns=1)


def _shares(lane: str, found: list[dict[str, float]]) -> Data:
    seconds = {stage: median([one[stage] for one in found]) for stage in STAGES} if found else {}
    total = sum(seconds.values())
    return [
        {"way": lane, "stage": stage, "seconds": spent, "share": spent / total, "place": STAGES.index(stage)}
        for stage, spent in seconds.items()
        if spent
    ]


@part("staleness")
@figure(100, "Staleness")
def staleness(results: Results) -> Picture:
    """The shares of exchanges by their staleness: others' updates from a gradient's weights to its use."""
    data: Data = []
    for row in results.rows:
        runs = results.runs[row.combination.folder]
        counts = sum((run.staleness for run in runs), Counter[int]())
        if any(counts):
            data += [
                {"way": row.combination.name, "updates": updates, "share": count / counts.total()}
                for updates, count in sorted(counts.items())
            ]
    return side_by_side(
        results,
        data,
        "bar",
        x=alt.X("updates:O", title="staleness: updates by others", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("share:Q", title="share of the exchanges", axis=alt.Axis(format="%")),
        tooltip=["way:N", "updates:O", number("share", "share", ".2%")],
    )


def bubbles(results: Results) -> Sequence[str]:
    """Name the ranks' idle time, over all steps but the first."""
    return [f"{way}: {record}." for way, record in _records(results)]


@part("pipeline")
@figure(90, "One step of the pipeline", bubbles)
def pipeline_lanes(results: Results) -> Picture:
    """A lane for each rank: forward and backward of each microbatch, the first run of each way to train."""
    records = list(_records(results))
    # One legend for all panels: it has the kinds of every schedule.
    colours = coloured("kind", KINDS, [{"kind": span.kind} for _, record in records for span in record.spans])
    panels = [_panel(way, record, colours) for way, record in records]
    return in_rows(panels, "kind", columns=1) if panels else None


def _records(results: Results) -> Iterator[tuple[str, PipelineRecord]]:
    for row, repeat, run in results.each():
        if repeat == 0 and run.pipeline is not None and run.pipeline.spans:
            yield row.combination.name, run.pipeline


def _panel(way: str, record: PipelineRecord, colours: dict[str, Any]) -> Any:
    data: Data = [
        {
            "rank": f"rank {span.rank}",
            "kind": span.kind,
            "microbatch": span.microbatch,
            "start": 1e3 * span.start,
            "stop": 1e3 * span.stop,
            "middle": 500 * (span.start + span.stop),
            "took": 1e3 * (span.stop - span.start),
        }
        for span in record.spans
    ]
    axis = alt.Y("rank:N", title=None, sort=[f"rank {rank}" for rank in range(len(record.idle))])
    base = alt.Chart(table(data))
    bars = base.mark_bar(stroke="white", strokeWidth=0.5, height=LANE - 8).encode(
        x=alt.X("start:Q", title="ms since the step began"),
        x2=alt.X2("stop:Q"),
        y=axis,
        **colours,
        tooltip=tips("kind:N", "microbatch:Q", number("start", "start, ms"), number("took", "took, ms")),
    )
    # Black can be read on each of the colours, white on few.
    words = base.mark_text(fontSize=10, color="black").encode(
        x=alt.X("middle:Q"), y=axis, text=alt.Text("microbatch:Q")
    )
    title = f"{way}: {record.schedule}, {record.microbatches} microbatches, idle {record.bubble:.0%}"
    return alt.layer(bars, words).properties(width=2 * WIDTH, height=alt.Step(LANE), title=title)
