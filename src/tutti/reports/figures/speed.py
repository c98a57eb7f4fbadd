"""Speed-up and efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from tutti.records.comparison import APART, STRONG, WEAK
from tutti.registry import part
from tutti.reports.figures.base import (
    HEIGHT,
    WIDTH,
    Data,
    Picture,
    coloured,
    figure,
    in_rows,
    number,
    table,
    tips,
)
from tutti.reports.results import Results


def _scaling(results: Results, kind: str) -> Picture:
    """Draw speed-up and efficiency against cores, beside the ideal; of one kind of scaling.

    The bars are the spread of the repeats: the baseline's median over the longest and the shortest.
    """
    data: Data = [
        {
            "way": row.combination.way,
            "name": row.combination.name,
            "cores": row.combination.cores,
            "speed-up": row.speed_up,
            "efficiency": row.efficiency,
            "least": row.speed_up * row.seconds / row.spread[1] if row.spread[1] else None,
            "most": row.speed_up * row.seconds / row.spread[0] if row.spread[0] else None,
        }
        for row in results.rows
        if row.combination.scaling == kind
        and row.speed_up is not None
        and row.seconds is not None
        and row.spread is not None
    ]
    if len(data) < 2:
        return None
    ways = [one.way for one in results.comparison.combinations]
    encoding = {
        **coloured("way", ways, data),
        "tooltip": tips(
            *("name:N", "cores:Q", number("speed-up", "speed-up"), number("least", "least")),
            *(number("most", "most"), number("efficiency", "efficiency", ".0%")),
        ),
    }
    return in_rows([_panel(y, data, encoding) for y in ("speed-up", "efficiency")], "way")


def _panel(y: str, data: Data, encoding: dict[str, Any]) -> Any:
    cores = sorted({row["cores"] for row in data})
    ideal = [{"cores": count, "speed-up": count, "efficiency": 1} for count in cores]
    percent = alt.Axis(format="%") if y == "efficiency" else alt.Axis()
    axes = {
        "x": alt.X("cores:Q", axis=alt.Axis(values=cores, format="d")),
        "y": alt.Y(f"{y}:Q", title=y, axis=percent, scale=alt.Scale(zero=True)),
    }
    line = alt.Chart(table(ideal)).mark_line(strokeDash=[4, 4], color="gray").encode(**axes)
    marks = alt.Chart(table(data)).mark_line(point=alt.OverlayMarkDef(size=80)).encode(**axes, **encoding)
    layers = [marks, line]
    if y == "speed-up":
        rules = alt.Chart(table(data)).mark_rule(strokeWidth=2)
        spread = rules.encode(x=axes["x"], y=alt.Y("least:Q", title=y), y2=alt.Y2("most:Q"), **encoding)
        layers.append(spread)
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _ideal(_: Results) -> Sequence[str]:
    return (
        "Speed-up is that over one process with one thread, efficiency is speed-up / cores; dashed is the "
        "ideal. Vertical lines are the spread of the repeats.",
    )


@part("speed-up")
@figure(30, "Speed-up and efficiency of these runs", _ideal)
def speed_up(results: Results) -> Picture:
    """Speed-up and efficiency of runs that were made one by one."""
    return _scaling(results, APART)


@part("strong-scaling")
@figure(40, "Speed-up and efficiency, strong scaling", _ideal)
def strong_scaling(results: Results) -> Picture:
    """Speed-up and efficiency with the same batch for any number of workers."""
    return _scaling(results, STRONG)


@part("weak-scaling")
@figure(50, "Speed-up and efficiency, weak scaling", _ideal)
def weak_scaling(results: Results) -> Picture:
    """Speed-up and efficiency with the same batch for each worker."""
    return _scaling(results, WEAK)
