"""A comparison as a table on the terminal, and the cells for all reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

from tutti.errors import in_one_line
from tutti.records.comparison import APART, STRONG, WEAK, Comparison
from tutti.records.texts import metric_text, span_text
from tutti.reports.results import Results
from tutti.reports.scaling import Row
from tutti.tables import TextTable
from tutti.terminal import console_on

NOTE: Final = "Seconds are those of training, without validation."

_EXPLAINED: Final = {
    "speed-up": "Speed-up: seconds of one process with one thread / seconds.",
    "vs all threads": "vs all threads: seconds of one process with all threads / seconds.",
    "efficiency": "Efficiency: speed-up / cores; at 100 % each core does as much as one alone.",
}
"""The columns that compare with one process."""

NO_SOLO: Final = "To see speed-up and efficiency, add solo to --strategies."

APART_NOTE: Final = "The baseline is a run of solo on as many samples, with the same batch size."

CHANGED_NOTE: Final = "A run whose number of ranks changed has no speed-up and no efficiency."

_FIRST_TO_GO: Final = ("shortest, longest", "efficiency", "vs all threads", "samples/s", "cores")
"""The columns that a narrow terminal leaves out first."""

_SCALINGS: Final = {
    STRONG: "strong scaling: the same batch size for all workers together",
    WEAK: "weak scaling: the same batch size for each worker",
    APART: "separate runs",
}


def show(results: Results, stream: IO[str]) -> None:
    """Print a table for each kind of scaling, then failures, the courses and the fastest way."""
    console = console_on(stream)
    for scaling, rows in by_scaling(results):
        console.print(_table(results, scaling, rows))
    for row in results.rows:
        if row.error is not None:
            console.print(f"{row.combination.name} failed: {in_one_line(row.error)}", style="red")
    for sentence in results.courses:
        console.print(sentence, markup=False)
    if (best := verdict(results)) is not None:
        console.print(best)
    if len(results.rows) > 1:
        console.print(note(results))


def by_scaling(results: Results) -> list[tuple[str, list[Row]]]:
    """Return the rows of each table, by the kind of scaling."""
    kinds = dict.fromkeys(row.combination.scaling for row in results.rows)
    return [(kind, [row for row in results.rows if row.combination.scaling == kind]) for kind in kinds]


def fastest(results: Results) -> list[Row]:
    """Return the row of the first table with the largest speed-up, and rows whose seconds overlap with it.

    The list is empty for a single row.
    """
    tables = [rows for _, rows in by_scaling(results)]
    rows = [row for row in (tables[0] if tables else []) if row.speed_up is not None]
    if len(rows) < 2:
        return []
    best = max(rows, key=lambda row: row.speed_up or 0.0)
    longest = best.spread[1] if best.spread is not None else 0.0
    equal = [row for row in rows if row is not best and row.spread is not None and row.spread[0] <= longest]
    return [best, *equal]


def verdict(results: Results) -> str | None:
    """Name the fastest way to train, and its ties; None if nothing can be compared."""
    found = fastest(results)
    if not found:
        return None
    best, *equal = found
    text = f"{'shortest median' if equal else 'fastest'}: {best.combination.name}"
    if best.speed_up == 1.0:
        text += "; nothing is faster than one process with one thread here"
    else:
        text += f", {best.speed_up:.2f} times as fast as one process with one thread"
        text += "" if best.efficiency is None else f"; its efficiency is {best.efficiency:.0%}"
    if equal:
        names = "; ".join(row.combination.name for row in equal)
        text += f". A tie, as their ranges of seconds overlap, with: {names}"
    return text


def note(results: Results) -> str:
    """Explain the columns."""
    shown = [*table_cells(results, results.rows)[0]]
    explained = [text for head, text in _EXPLAINED.items() if head in shown]
    notes = [NOTE, *(explained or [NO_SOLO])]
    notes += [APART_NOTE] if any(row.combination.scaling == APART for row in results.rows) else []
    return " ".join([*notes, CHANGED_NOTE] if any(row.cores_in_turn for row in results.rows) else notes)


def title(comparison: Comparison, scaling: str) -> str:
    """Return the title of the table of one kind of scaling."""
    many = f", median of {comparison.repeats}" if comparison.repeats > 1 else ""
    how = f"{many}; {_SCALINGS[scaling]}" if len(comparison.combinations) > 1 else ""
    return f"{comparison.model} on {comparison.data}{how}"


def table_cells(results: Results, rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells of each row by the heads of the columns; without a baseline there is no speed-up."""
    table = [_cells(results, row) for row in rows]
    return [
        {
            head: cell
            for head, cell in cells.items()
            if head not in _EXPLAINED or any(row[head] for row in table)
        }
        for cells in table
    ]


def _cells(results: Results, row: Row) -> dict[str, str]:
    comparison, name = results.comparison, row.combination.name
    if row.combination.scaling == APART:
        name += "" if row.finished else " (unfinished)"
    elif row.finished < comparison.repeats:
        name += f" ({row.finished} of {comparison.repeats} runs)"
    cores = span_text(row.cores_in_turn or [row.combination.cores])
    cells = {"way to train": name, "cores": cores, "seconds": _number(row.seconds, ".2f")}
    if comparison.repeats > 1:
        spread = row.spread
        cells["shortest, longest"] = "" if spread is None else f"{spread[0]:.2f}, {spread[1]:.2f}"
    cells["samples/s"] = _number(row.samples_per_s, ",.0f")
    ratios = row.speed_up, row.speed_up_all, row.efficiency
    cells |= zip(_EXPLAINED, map(_number, ratios, (".2f", ".2f", ".0%")), strict=True)
    accuracy = None if row.accuracy is None else 100 * row.accuracy
    cells[f"{results.part} accuracy %"] = _number(accuracy, ".2f")
    for metric in dict.fromkeys(metric for one in results.rows for metric in one.metrics):
        cells[metric] = metric_text(metric, row.metrics[metric]) if metric in row.metrics else ""
    if comparison.goal is not None:
        cells[f"seconds to {100 * comparison.goal:g} %"] = _number(row.to_target, ".2f")
    return cells


def _table(results: Results, scaling: str, rows: Sequence[Row]) -> TextTable:
    table = table_cells(results, rows)
    names = [*table[0]]
    others = [head for head in reversed(names[3:]) if head not in (*_FIRST_TO_GO, "speed-up")]
    drop = [head for head in (*_FIRST_TO_GO, *others) if head in names]
    shown = TextTable(names, drop=drop, title=title(results.comparison, scaling))
    for row, cells in zip(rows, table, strict=True):
        shown.add_row(*cells.values(), style="" if row.error is None else "red")
    return shown


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
