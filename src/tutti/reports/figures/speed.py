"""Speed-up and efficiency."""

from __future__ import annotations

from typing import Any, Final

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

_TITLES: Final = {APART: "these runs", STRONG: "strong scaling", WEAK: "weak scaling"}


def _panels(results: Results, kind: str) -> list[Any]:
    """Draw one kind of scaling; bars are from the slowest to the fastest repeat."""
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
        return []
    ways = [one.way for one in results.comparison.combinations]
    encoding = {
        **coloured("way", ways, data),
        "tooltip": tips(
            *("name:N", "cores:Q", number("speed-up", "speed-up"), number("least", "least")),
            *(number("most", "most"), number("efficiency", "efficiency", ".0%")),
        ),
    }
    panels = [_panel(y, data, encoding) for y in ("speed-up", "efficiency")]
    return [panel.properties(title=_TITLES[kind]) for panel in panels]


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
        ends = {"y": alt.Y("least:Q", title=y), "y2": alt.Y2("most:Q")}
        layers.append(rules.encode(x=axes["x"], **ends, **encoding))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


_EXPLAINED: Final = (
    "Speed-up is over one process with one thread. Efficiency is speed-up / cores: at 100 % each core does "
    "as much as one alone. Dashed is the ideal; vertical lines are the spread of the repeats."
)


@part("speed-up")
@figure(30, "Speed-up and efficiency", lambda _: [_EXPLAINED])
def speed_up(results: Results) -> Picture:
    """Speed-up and efficiency against cores, beside the ideal, for each kind of scaling."""
    panels = [panel for kind in _TITLES for panel in _panels(results, kind)]
    return in_rows(panels, "way") if panels else None
