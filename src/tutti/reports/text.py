"""A comparison as a table on the terminal, and what the tables of all reports say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

from rich import box
from rich.console import Console
from rich.table import Table

from tutti.comparisons import SCALINGS, STRONG, WEAK, Comparison
from tutti.reports.scaling import Row

WIDE: Final = 160
"""Columns of text when nobody says how many there are."""

NOTE: Final = (
    "speed-up: seconds of one process with one thread / seconds; of all threads: seconds of one process with "
    "all threads / seconds; efficiency: speed-up / cores. Seconds are those of training, without validation."
)

_SCALINGS: Final = {
    STRONG: "strong scaling: the same samples behind every update",
    WEAK: "weak scaling: the same samples of every worker behind an update",
}


def show(comparison: Comparison, rows: Sequence[Row], stream: IO[str]) -> None:
    """Print the tables, one for each kind of scaling, and below them what failed.

    Args:
        comparison: what was compared.
        rows: its results, from `tutti.reports.scaling.rows`.
        stream: where to.
    """
    console = Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False)
    for scaling in SCALINGS:
        of = [row for row in rows if row.combination.scaling == scaling]
        if of:
            console.print(_table(comparison, of, scaling))
    for row in rows:
        if row.error is not None:
            last = row.error.splitlines()[-1] if row.error else ""
            console.print(f"{row.combination.name} failed: {last}", style="red", markup=False)
    if any(row.speed_up is not None for row in rows):
        console.print(NOTE, markup=False)


def title(comparison: Comparison, scaling: str) -> str:
    """What stands above the table of one kind of scaling."""
    return f"{comparison.model} on {comparison.data}, median of {comparison.repeats}; {_SCALINGS[scaling]}"


def heads(comparison: Comparison) -> list[str]:
    """The heads of the columns."""
    found = ["way to train", "cores", "seconds", "shortest, longest", "samples/s", "speed-up"]
    found += ["of all threads", "efficiency", "accuracy %"]
    return found + ([] if comparison.target is None else [f"seconds to {100 * comparison.target:g} %"])


def cells(comparison: Comparison, row: Row) -> list[str]:
    """The cells of a row; empty where there is no number."""
    name = row.combination.name
    if row.finished < comparison.repeats:
        name += f" ({row.finished} of {comparison.repeats} runs)"
    found = [
        name,
        str(row.combination.cores),
        _number(row.seconds, ".2f"),
        "" if row.spread is None else f"{row.spread[0]:.2f}, {row.spread[1]:.2f}",
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
