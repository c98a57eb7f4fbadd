"""A comparison as a table on the terminal, and what the tables of all reports say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

from rich import box
from rich.table import Table

from tutti.comparisons import APART, STRONG, WEAK, Comparison
from tutti.reports.results import Results
from tutti.reports.scaling import Row
from tutti.terminal import console_on

NOTE: Final = (
    "speed-up: seconds of one process with one thread / seconds; of all threads: seconds of one process with "
    "all threads / seconds; efficiency: speed-up / cores. Seconds are those of training, without validation."
)

APART_NOTE: Final = (
    "A run is compared with one of solo that trained on as many samples, as many behind a round of updates."
)

_SCALINGS: Final = {
    STRONG: "strong scaling: the same samples behind every update",
    WEAK: "weak scaling: the same samples of every worker behind an update",
    APART: "runs that were made one by one",
}


def show(results: Results, stream: IO[str]) -> None:
    """Print the tables, one for each kind of scaling, and below them what failed and what was fastest.

    Args:
        results: what was found.
        stream: where to.
    """
    console = console_on(stream)
    for scaling, rows in by_scaling(results):
        console.print(_table(results.comparison, rows, scaling))
    for row in results.rows:
        if row.error is not None:
            last = row.error.splitlines()[-1] if row.error else ""
            console.print(f"{row.combination.name} failed: {last}", style="red")
    said = verdict(results)
    if said is not None:
        console.print(said)
    if len(results.rows) > 1:
        console.print(note(results))


def by_scaling(results: Results) -> list[tuple[str, list[Row]]]:
    """The rows of each table, by the kind of scaling."""
    kinds = dict.fromkeys(row.combination.scaling for row in results.rows)
    return [(kind, [row for row in results.rows if row.combination.scaling == kind]) for kind in kinds]


def fastest(results: Results) -> Row | None:
    """The row of the first table with the largest speed-up; None where there are no two to choose from."""
    tables = [rows for _, rows in by_scaling(results)]
    rows = [row for row in (tables[0] if tables else []) if row.speed_up is not None]
    return max(rows, key=lambda row: row.speed_up or 0.0) if len(rows) > 1 else None


def verdict(results: Results) -> str | None:
    """Which way was fastest, in a sentence; None where nothing can be compared."""
    best = fastest(results)
    if best is None:
        return None
    if best.speed_up == 1.0:
        return f"fastest: {best.combination.name}; nothing is faster than one process with one thread here"
    efficiency = "" if best.efficiency is None else f"; its efficiency is {best.efficiency:.0%}"
    return (
        f"fastest: {best.combination.name}, {best.speed_up:.2f} times as fast as one process with one thread"
        f"{efficiency}"
    )


def note(results: Results) -> str:
    """What the columns mean."""
    apart = any(row.combination.scaling == APART for row in results.rows)
    return f"{NOTE} {APART_NOTE}" if apart else NOTE


def title(comparison: Comparison, scaling: str) -> str:
    """What stands above the table of one kind of scaling."""
    many = f", median of {comparison.repeats}" if comparison.repeats > 1 else ""
    return f"{comparison.model} on {comparison.data}{many}; {_SCALINGS[scaling]}"


def heads(comparison: Comparison) -> list[str]:
    """The heads of the columns."""
    found = ["way to train", "cores", "seconds"]
    found += ["shortest, longest"] if comparison.repeats > 1 else []
    found += ["samples/s", "speed-up", "of all threads", "efficiency", "accuracy %"]
    return found + ([] if comparison.target is None else [f"seconds to {100 * comparison.target:g} %"])


def cells(comparison: Comparison, row: Row) -> list[str]:
    """The cells of a row; empty where there is no number."""
    name = row.combination.name
    if row.combination.scaling == APART:
        name += "" if row.finished else " (unfinished)"
    elif row.finished < comparison.repeats:
        name += f" ({row.finished} of {comparison.repeats} runs)"
    found = [name, str(row.combination.cores), _number(row.seconds, ".2f")]
    if comparison.repeats > 1:
        found.append("" if row.spread is None else f"{row.spread[0]:.2f}, {row.spread[1]:.2f}")
    found += [
        _number(row.samples_per_s, ",.0f"),
        _number(row.speed_up, ".2f"),
        _number(row.speed_up_all, ".2f"),
        _number(row.efficiency, ".0%"),
        _number(None if row.accuracy is None else 100 * row.accuracy, ".2f"),
    ]
    return found + ([] if comparison.target is None else [_number(row.to_target, ".2f")])


def _table(comparison: Comparison, rows: Sequence[Row], scaling: str) -> Table:
    name = title(comparison, scaling)
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, head in enumerate(heads(comparison)):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(comparison, row), style="red" if row.error is not None else None)
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
