"""The work of a pipeline's ranks in one step, and its bubble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from tutti.records.pipeline import KINDS, PipelineRecord
from tutti.registry import part
from tutti.reports.figures.base import WIDTH, Data, Picture, coloured, figure, in_rows, number, table, tips
from tutti.reports.results import Results

LANE = 34
"""Pixels from one rank to the next."""


def bubbles(results: Results) -> Sequence[str]:
    """Name the ranks' idle time, over all steps but the first."""
    return [f"{way}: {record}." for way, record in _records(results)]


@part("pipeline")
@figure(90, "One step of the pipeline", bubbles)
def lanes(results: Results) -> Picture:
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
            "stage": span.stage,
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
        tooltip=tips(
            "kind:N", "stage:Q", "microbatch:Q", number("start", "start, ms"), number("took", "took, ms")
        ),
    )
    # Black can be read on each of the colours, white on few.
    words = base.mark_text(fontSize=10, color="black").encode(
        x=alt.X("middle:Q"), y=axis, text=alt.Text("microbatch:Q")
    )
    title = f"{way}: {record.schedule}, {record.microbatches} microbatches, idle {record.bubble:.0%}"
    return alt.layer(bars, words).properties(width=2 * WIDTH, height=alt.Step(LANE), title=title)
