"""The load of the cores, and the memory of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import mean, median

import altair as alt

from tutti.records.usage import UsageRecord
from tutti.registry import part
from tutti.reports.figures.base import (
    Data,
    Picture,
    amount,
    chart,
    coloured,
    figure,
    in_rows,
    number,
    pick,
    stacked,
)
from tutti.reports.results import Results
from tutti.reports.runs import Run

POINTS = 300
"""The approximate number of points of a line; longer runs are averaged."""

MIB = 2**20


@part("cores")
@figure(110, "How busy the cores were")
def cores(results: Results) -> Picture:
    """The load of every core against time: one process, and the fastest parallel way."""
    found: dict[str, Data] = {}
    for row in results.pair(lambda row: row.samples_per_s):
        run = next((run for run in results.runs[row.combination.folder] if run.usage), None)
        if run is not None:
            found[row.combination.name] = _busy(run)
    if not found:
        return None
    data = [point for points in found.values() for point in points]
    colours = coloured("core", dict.fromkeys(row["core"] for row in data), data, faint=0.05)
    axes = {
        "x": amount("seconds", "seconds since the first sample"),
        "y": alt.Y("busy:Q", title="busy, %", scale=alt.Scale(domain=[0, 100])),
        "tooltip": ["core:N", number("seconds", "seconds"), number("busy", "busy, %", ".0f")],
    }
    line = alt.MarkDef("line", strokeWidth=1.5)
    panels = [chart(points, line, colours, **axes).properties(title=way) for way, points in found.items()]
    return in_rows(panels, "core")


def _busy(run: Run) -> Data:
    hosts = sorted({record.host for record in run.usage})
    began = run.usage[0].time
    return [
        {"core": name, "seconds": mean(record.time for record in some) - began, "busy": mean(busy)}
        for host in hosts
        for some in _thinned([record for record in run.usage if record.host == host])
        for core, busy in enumerate(zip(*(record.cores for record in some), strict=False))
        for name in [f"core {core}" if len(hosts) == 1 else f"{host}: core {core}"]
    ]


def _thinned(records: Sequence[UsageRecord]) -> Iterator[list[UsageRecord]]:
    """Yield groups of neighbouring samples, about `POINTS` of them."""
    together = -(-len(records) // POINTS)
    for _, some in groupby(enumerate(records), key=lambda one: one[0] // together):
        yield [record for _, record in some]


@part("memory")
@figure(120, "Memory")
def memory(results: Results) -> Picture:
    """The peak memory of each rank: the median of the repeats. Shared memory counts in equal parts."""
    data: Data = []
    for row in results.rows:
        most = [_most(run) for run in results.runs[row.combination.folder]]
        for rank in sorted({rank for run in most for rank in run}):
            size = median(run[rank] for run in most if rank in run) / MIB
            data.append({"way": row.combination.name, "rank": f"rank {rank}", "place": rank, "memory": size})
    if not data:
        return None
    ranks = [row["rank"] for row in sorted(data, key=lambda row: row["place"])]
    tooltip = ["way:N", "rank:N", number("memory", "MiB", ",.0f")]
    drawn = stacked(data, "rank", ranks, amount("memory", "MiB (proportional set size)"), tooltip)
    return drawn.add_params(pick("rank"))


def _most(run: Run) -> dict[int, int]:
    """Return the largest proportional set size of each rank, in bytes."""
    most: dict[int, int] = {}
    for record in run.usage:
        for rank in record.ranks:
            if rank.pss is not None:
                most[rank.rank] = max(most.get(rank.rank, 0), rank.pss)
    return most
