"""The seconds of each stage, and the staleness of exchanges."""

from __future__ import annotations

from collections import Counter
from statistics import median

import altair as alt

from tutti.records.run import STAGES
from tutti.registry import part
from tutti.reports.advice import where_the_time_went
from tutti.reports.figures.base import (
    Data,
    Picture,
    amount,
    figure,
    in_rows,
    number,
    side_by_side,
    stacked,
)
from tutti.reports.results import Results


def advised(results: Results) -> list[str]:
    """Advise each way to train, from its seconds by stage."""
    found = []
    for row in results.rows:
        runs = results.runs[row.combination.folder]
        history = [record for run in runs for record in run.history]
        # A way that has failed has no runs.
        if runs and (text := where_the_time_went(history, runs[0].config)):
            found.append(f"{row.combination.name}: {text}")
    return found


@part("stages")
@figure(80, "Where the time went", advised)
def stages(results: Results) -> Picture:
    """The seconds of each stage, over all ranks and for each rank: medians of the repeats."""
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
    """The shares of exchanges by staleness, in updates by others."""
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
