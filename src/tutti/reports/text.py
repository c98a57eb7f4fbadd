"""A comparison as a table on the terminal, and the cells that all reports share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final

from rich import box
from rich.console import Console
from rich.table import Table

from tutti.errors import in_one_line
from tutti.records.comparison import APART, STRONG, WEAK, Comparison
from tutti.records.texts import metric_text
from tutti.reports.results import Results
from tutti.reports.scaling import Row
from tutti.terminal import UNBOUNDED, console_on

NOTE: Final = (
    "speed-up: seconds of one process with one thread / seconds; of all threads: seconds of one process with "
    "all threads / seconds; efficiency: speed-up / cores. Seconds are those of training, without validation."
)

APART_NOTE: Final = (
    "A run is compared with one of solo that trained on as many samples, as many behind a round of updates."
)

NAME_COLUMNS: Final = 28
"""Columns of text, a third of the terminal at most, below which names are not folded for numbers."""

FOLDED_COLUMNS: Final = 12
"""Columns of text below which names are not folded for the last numbers."""

_FIRST_TO_GO: Final = ("shortest, longest", "efficiency", "of all threads", "samples/s", "cores")
"""Columns that are left out, one after the other, where a terminal has no room for all."""

_ALWAYS: Final = ("way to train", "seconds", "speed-up")
"""Columns that are shown on a terminal of any width."""

_NONE: Final = "-"
"""The cell without a number, so that each row has as many words as the others."""

_GAP: Final = 2
"""Columns of text between two columns of a table."""

_SCALINGS: Final = {
    STRONG: "strong scaling: the same samples behind every update",
    WEAK: "weak scaling: the same samples of every worker behind an update",
    APART: "runs that were made one by one",
}


def show(results: Results, stream: IO[str]) -> None:
    """Print the tables, one for each kind of scaling, and below them what failed and what was fastest.

    On a terminal, long names are folded, and columns that have no room are left out and named. Elsewhere
    every row is one line with all columns.
    """
    console = console_on(stream, UNBOUNDED)
    left_out: list[str] = []
    for scaling, rows in by_scaling(results):
        console.print(title(results.comparison, scaling), style="bold")
        columns = _columns(results.comparison, rows, console)
        shown = _fitting(columns, console.width)
        left_out += [column.head for column in columns if column not in shown]
        console.print(_table(shown, rows, console))
    if not console.is_terminal:
        console.print()
    for row in results.rows:
        if row.error is not None:
            console.print(f"{row.combination.name} failed: {in_one_line(row.error)}", style="red")
    for sentence in results.courses:
        console.print(sentence, markup=False)
    said = verdict(results)
    if said is not None:
        console.print(said)
    if len(results.rows) > 1:
        console.print(note(results))
    if left_out:
        names = "; ".join(dict.fromkeys(left_out))
        console.print(f"There is no room here for: {names}. A wider terminal, or a pipe, shows all.")


def by_scaling(results: Results) -> list[tuple[str, list[Row]]]:
    """Return the rows of each table, by the kind of scaling."""
    kinds = dict.fromkeys(row.combination.scaling for row in results.rows)
    return [(kind, [row for row in results.rows if row.combination.scaling == kind]) for kind in kinds]


def fastest(results: Results) -> Row | None:
    """Return the first table's row with the largest speed-up; None unless there are two to choose from."""
    tables = [rows for _, rows in by_scaling(results)]
    rows = [row for row in (tables[0] if tables else []) if row.speed_up is not None]
    return max(rows, key=lambda row: row.speed_up or 0.0) if len(rows) > 1 else None


def verdict(results: Results) -> str | None:
    """Name the fastest way to train, in a sentence; None if nothing can be compared."""
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
    """Explain the columns."""
    apart = any(row.combination.scaling == APART for row in results.rows)
    return f"{NOTE} {APART_NOTE}" if apart else NOTE


def title(comparison: Comparison, scaling: str) -> str:
    """Return the title of the table of one kind of scaling."""
    many = f", median of {comparison.repeats}" if comparison.repeats > 1 else ""
    return f"{comparison.model} on {comparison.data}{many}; {_SCALINGS[scaling]}"


def other_metrics(rows: Sequence[Row]) -> list[str]:
    """Return the names of the metrics of some row, but of the accuracy."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def heads(comparison: Comparison, metrics: Sequence[str] = ()) -> list[str]:
    """Return the heads of the columns, with one for each of the metrics."""
    found = ["way to train", "cores", "seconds"]
    found += ["shortest, longest"] if comparison.repeats > 1 else []
    found += ["samples/s", "speed-up", "of all threads", "efficiency", "accuracy %", *metrics]
    return found + ([] if comparison.target is None else [f"seconds to {100 * comparison.target:g} %"])


def cells(comparison: Comparison, row: Row, metrics: Sequence[str] = ()) -> list[str]:
    """Return the cells of a row, with one for each of the metrics; empty where there is no number."""
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
        *(metric_text(name, row.metrics[name]) if name in row.metrics else "" for name in metrics),
    ]
    return found + ([] if comparison.target is None else [_number(row.to_target, ".2f")])


@dataclass(frozen=True)
class _Column:
    """A column: its head, its cells, and the fewest columns of text that it can do with."""

    head: str
    cells: Sequence[str]
    least: int


def _columns(comparison: Comparison, rows: Sequence[Row], console: Console) -> list[_Column]:
    metrics = other_metrics(rows)
    table = zip(*(cells(comparison, row, metrics) for row in rows), strict=True)
    (way, names), *numbers = zip(heads(comparison, metrics), table, strict=True)
    found = [_Column(way, names, min(max(map(len, (way, *names))), NAME_COLUMNS, console.width // 3))]
    for head, given in numbers:
        words, values = head.split() if console.is_terminal else [head], [value or _NONE for value in given]
        found.append(_Column(head, values, max(map(len, (*values, *words)))))
    return found


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Return the columns that a terminal of some width has room for."""
    found = list(columns)
    others = [column.head for column in reversed(columns) if column.head not in (*_FIRST_TO_GO, *_ALWAYS)]
    for head in (*_FIRST_TO_GO, *others):
        foldable = max(0, columns[0].least - FOLDED_COLUMNS) if head in others else 0
        if _room_beside(found, width) + foldable >= 0:
            break
        found = [column for column in found if column.head != head]
    return found


def _room_beside(columns: Sequence[_Column], width: int) -> int:
    """Return the columns of text that are left over in a line."""
    return width - 1 - sum(column.least + _GAP for column in columns)


def _table(columns: Sequence[_Column], rows: Sequence[Row], console: Console) -> Table:
    if console.is_terminal:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0))
    else:
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    ways, *numbers = columns
    room = max(1, ways.least + _room_beside(columns, console.width))
    table.add_column(ways.head, width=min(max(map(len, (ways.head, *ways.cells))), room), overflow="fold")
    for column in numbers:
        table.add_column(column.head, justify="right", width=column.least, overflow="fold")
    for row, *texts in zip(rows, *(column.cells for column in columns), strict=True):
        table.add_row(*texts, style="red" if row.error is not None else None)
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
