"""The common parts of figures: tables, colours with a clickable legend, axes and bars.

Every figure is drawn from tables: lists of dicts, one for each mark. A click on a name in the legend picks
it, and a second click undoes that; several names can be picked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from tutti.records.texts import is_share
from tutti.reports.results import Results

WIDTH: Final = 420
HEIGHT: Final = 260
BAR: Final = 24
"""Pixels from one bar to the next."""

TICKS: Final = 8
"""The approximate number of ticks on an axis."""

COLOURS: Final = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d"),
    *("#bab0ac", "#9ecae9", "#ffbf79", "#88d27a", "#83bcb6", "#b79a20", "#439894", "#79706e", "#d6a5c9"),
)

Data = list[dict[str, Any]]

Picture = Any
"""An altair chart, possibly composed of several; None: there is nothing to draw."""


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    place: int
    title: str
    draw: Callable[[Results], Picture]
    says: Callable[[Results], Sequence[str]]


def figure(
    place: int, title: str, says: Callable[[Results], Sequence[str]] = lambda _: ()
) -> Callable[[Callable[[Results], Picture]], Figure]:
    """Make a `Figure` of the function that draws it."""
    return lambda draw: Figure(place, title, draw, says)


def table(rows: Data | alt.Data) -> Any:
    """Return the rows as the data of a chart; numbers that are not finite become blank."""
    if isinstance(rows, alt.Data):
        return rows
    blank = [{key: _finite(value) for key, value in row.items()} for row in rows]
    return alt.Data(values=blank)  # type: ignore[no-untyped-call]


def pick(field: str) -> Any:
    """Return the selection by clicks on the legend of `field`. One chart of a figure has it."""
    return alt.selection_point(name="picked", fields=[field], bind="legend", toggle="true")


def coloured(
    field: str, names: Iterable[str], rows: Data, title: str | None = None, faint: float = 0.1
) -> dict[str, Any]:
    """Colour by the column `field`; names that are not picked get the opacity `faint`.

    The index of a name in `names` decides its colour, so it is the same in all figures. The legend has the
    names in `rows`.
    """
    present = {row[field] for row in rows}
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    shown = {name: colour for name, colour in colours.items() if name in present}
    return {
        "color": alt.Color(
            f"{field}:N",
            title=title,
            scale=alt.Scale(domain=[*shown], range=[*shown.values()]),
            legend=alt.Legend(orient="bottom", columns=4, symbolLimit=0, labelLimit=240, symbolOpacity=1),
        ),
        "opacity": alt.OpacityValue(**alt.condition(pick(field), alt.value(1.0), alt.value(faint))),
    }


def names(results: Results) -> list[str]:
    """Return the name of every way to train, in the order of the table."""
    return [one.name for one in results.comparison.combinations]


def lanes() -> Any:
    """Return a vertical axis with a lane for each way to train, in the order of the table."""
    return alt.Y("way:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))


def tips(*lines: Any) -> list[Any]:
    """Return a tool tip of columns and numbers, ten times faster than altair's shorthand."""
    return [alt.Tooltip(line) if isinstance(line, str) else line for line in lines]


def number(field: str, title: str, form: str = ",.4~g") -> Any:
    """Return a number for a tool tip."""
    return alt.Tooltip(f"{field}:Q", title=title, format=form)


def upwards(rows: Data, field: str, title: str) -> Any:
    """Return a vertical axis that need not begin at 0."""
    # For equal values Vega would write 1.
    found = {row[field] for row in rows}
    axis = alt.Axis(format="~%" if is_share(field) else ".4~g", tickCount=TICKS)
    axis.values = [*found] if len(found) == 1 else alt.Undefined
    return alt.Y(f"{field}:Q", title=title, axis=axis, scale=alt.Scale(zero=False))


def amount(field: str, title: str) -> Any:
    """Return a horizontal axis for amounts."""
    return alt.X(f"{field}:Q", title=title, axis=alt.Axis(tickCount=TICKS))


def chart(
    rows: Any,
    mark: Any,
    colours: dict[str, Any],
    *,
    wide: bool = False,
    height: Any = HEIGHT,
    tooltip: Sequence[Any],
    **further: Any,
) -> Any:
    """Draw a mark for each row, with further encodings such as x and y; `wide` is two panels."""
    drawn = alt.Chart(table(rows), mark=mark).encode(**colours, **further, tooltip=tips(*tooltip))
    return drawn.properties(width=2 * WIDTH if wide else WIDTH, height=height)


def stacked(rows: Data, field: str, names: Iterable[str], x: Any, tooltip: Sequence[Any]) -> Any:
    """Draw a lane for each way to train, with a bar for each row in the order of the column "place"."""
    further = {"x": x, "y": lanes(), "order": alt.Order("place:Q"), "tooltip": tooltip}
    return chart(rows, "bar", coloured(field, names, rows), wide=True, height=alt.Step(BAR), **further)


def side_by_side(results: Results, rows: Data, mark: Any, **further: Any) -> Picture:
    """Draw the marks of each way to train beside each other, for every value of x."""
    if not rows:
        return None
    colours = coloured("way", names(results), rows)
    offset = alt.XOffset("way:N", sort=None)
    return chart(rows, mark, colours, wide=True, xOffset=offset, **further).add_params(pick("way"))


def in_rows(panels: Sequence[Any], field: str, columns: int = 2) -> Any:
    """Arrange panels in rows; a click on the legend of `field` picks in all of them."""
    panels = [panels[0].add_params(pick(field)), *panels[1:]]
    rows = [alt.hconcat(*panels[at : at + columns]) for at in range(0, len(panels), columns)]
    return alt.vconcat(*rows) if len(rows) > 1 else rows[0]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
