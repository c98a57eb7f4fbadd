"""The figures of a search's page, as altair charts."""

from __future__ import annotations

import math
from typing import Any, Final

import altair as alt

from tutti.reports.figures.base import BAR, HEIGHT, TICKS, WIDTH, Data, in_rows, number, table, tips
from tutti.reports.page import Drawn
from tutti.studies.search.study import Tuned

STATES: Final = {"complete": "#4c78a8", "pruned": "#bab0ac"}
"""The states of the trials with a value, and their colours."""


def figures_of(tuned: Tuned) -> list[Drawn]:
    """Draw all figures that have data."""
    rows = [row for row in tuned.trials if row["state"] in STATES]
    if not rows:
        return []
    scores, names = tuned.search.scores, list(tuned.search.space.distributions)
    # In the name of a field a point means an object, and a bracket an array.
    plain = {name: name.replace(".", " ") for name in names}
    data: Data = [
        {
            "trial": row["trial"],
            "state": row["state"],
            **{score.name: row[str(score)] for score in scores},
            **{plain[name]: _shown(row[name]) for name in names},
        }
        for row in rows
    ]
    drawn = []
    if len(scores) > 1:
        drawn.append(Drawn("front", "The objectives against each other", _front(tuned, data)))
    drawn.append(Drawn("history", "The trials, and the best so far", _history(tuned, data)))
    shares = tuned.importance
    if shares:
        drawn.append(Drawn("importance", "Importance", _importance(shares)))
    drawn.append(Drawn("slices", "Score by option", _slices(tuned, data, plain)))
    return drawn


def _shown(value: Any) -> Any:
    """Return a value as a number or text for a chart."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _state() -> Any:
    scale = alt.Scale(domain=[*STATES], range=[*STATES.values()])
    return alt.Color("state:N", title=None, scale=scale, legend=alt.Legend(orient="bottom"))


def _tips(tuned: Tuned, data: Data) -> list[Any]:
    values = [number(score.name, score.name) for score in tuned.search.scores]
    others = {"trial", *(score.name for score in tuned.search.scores)}
    options = [name for name in data[0] if name not in others]
    return tips(number("trial", "trial", "d"), *values, *(alt.Tooltip(f"{name}:N") for name in options))


def _value(tuned: Tuned, at: int = 0) -> Any:
    score = tuned.search.scores[at]
    axis = alt.Axis(format="~%" if score.is_share else ".4~g", tickCount=TICKS)
    return alt.Y(f"{score.name}:Q", title=score.name, axis=axis, scale=alt.Scale(zero=False))


def _history(tuned: Tuned, data: Data) -> Any:
    """Draw the value of each trial by its number, with a line for the best so far."""
    score = tuned.search.scores[0]
    best, line = math.nan, []
    for row in data:
        if row["state"] == "complete":
            better = max if score.higher else min
            best = row[score.name] if math.isnan(best) else better(best, row[score.name])
        if not math.isnan(best):
            line.append({"trial": row["trial"], score.name: best})
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(format="d"))
    steps = alt.Chart(table(line)).mark_line(interpolate="step-after", color="#f58518")
    points = alt.Chart(table(data)).mark_point(filled=True, size=50)
    layers = (
        steps.encode(x=x, y=_value(tuned)),
        points.encode(x=x, y=_value(tuned), color=_state(), tooltip=_tips(tuned, data)),
    )
    return alt.layer(*layers).properties(width=2 * WIDTH, height=HEIGHT)


def _importance(shares: dict[str, float]) -> Any:
    data: Data = [{"option": name, "share": share} for name, share in shares.items()]
    return (
        alt.Chart(table(data))
        .mark_bar(color="#4c78a8")
        .encode(
            x=alt.X("share:Q", title="importance for the score", axis=alt.Axis(format="%", tickCount=TICKS)),
            y=alt.Y("option:N", sort=None, title=None),
            tooltip=tips("option:N", number("share", "share", ".1%")),
        )
        .properties(width=2 * WIDTH, height=alt.Step(BAR))
    )


def _axis(tuned: Tuned, name: str, field: str) -> Any:
    """Return the horizontal axis of an option."""
    space = tuned.search.space
    if space.is_choice(name):
        order = [_shown(value) for value in space.ends(name)]
        return alt.X(f"{field}:N", title=name, sort=order, axis=alt.Axis(labelAngle=0))
    log = str(space.written[name]).strip().startswith("log")
    scale = alt.Scale(type="log" if log else "linear", domain=space.ends(name), nice=False)
    axis = alt.Axis(format="~g", tickCount=TICKS) if log else alt.Axis()
    return alt.X(f"{field}:Q", title=name, scale=scale, axis=axis)


def _slices(tuned: Tuned, data: Data, plain: dict[str, str]) -> Any:
    """Draw a panel for each option, with the value of each trial."""
    rows, seen = table(data), _tips(tuned, data)
    panels = [
        alt.Chart(rows)
        .mark_point(filled=True, size=50)
        .encode(x=_axis(tuned, name, field), y=_value(tuned), color=_state(), tooltip=seen)
        .properties(width=WIDTH, height=HEIGHT)
        for name, field in plain.items()
    ]
    return in_rows(panels, "state")


def _front(tuned: Tuned, data: Data) -> Any:
    """Draw the first two objectives; a line joins the trials of the Pareto front."""
    second = tuned.search.scores[1]
    best = {trial.number for trial in tuned.front}
    x = alt.X(f"{second.name}:Q", title=second.name, scale=alt.Scale(zero=False))
    line = alt.Chart(table([row for row in data if row["trial"] in best])).mark_line(
        color="#f58518", interpolate="step-after", point=True
    )
    points = alt.Chart(table(data)).mark_point(filled=True, size=50)
    order = alt.Order(f"{second.name}:Q")
    layers = (
        points.encode(x=x, y=_value(tuned), color=_state(), tooltip=_tips(tuned, data)),
        line.encode(x=x, y=_value(tuned), order=order),
    )
    return alt.layer(*layers).properties(width=2 * WIDTH, height=HEIGHT)
