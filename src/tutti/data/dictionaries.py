"""The tables of several files as one: the texts of all get the numbers of one dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tutti.data.arrays import as_array
from tutti.data.contents import Contents
from tutti.data.rows import Array, Rows, StoredRows
from tutti.data.tables import LIKE
from tutti.errors import BadData
from tutti.records.preparation import EMPTY, TEXT, Table, TableColumn


def like(options: Mapping[str, Any], first: Contents[object]) -> dict[str, Any]:
    """Return the options by which other files are read: columns are of the kinds of the first file's."""
    table = None if LIKE in options else first.table
    return {**options, **({} if table is None else {LIKE: table.columns})}


def with_one_table(several: Sequence[Contents[object]]) -> list[Contents[object]]:
    """Return the contents of several files, read `like` the first, with one table.

    Raises:
        BadData: a column is of several kinds.
    """
    tables = [one.table for one in several if one.table is not None]
    if len(tables) < len(several):
        return list(several)
    columns = tuple(map(_together, zip(*(table.columns for table in tables), strict=True)))
    table = replace(tables[0], columns=columns)
    return [_renumbered(one, table) for one in several]


def _together(columns: Sequence[TableColumn]) -> TableColumn:
    first = next((column for column in columns if column.kind != EMPTY), columns[0])
    for column in columns:
        if column.kind not in (first.kind, EMPTY) or column.form != first.form:
            raise BadData(
                f"the column '{column.name}' is of the kind {first.kind} in one file, and {column.kind} in "
                "another; write both alike, or leave it out by --data.columns A,B,..."
            )
    return replace(first, texts=tuple(sorted({text for column in columns for text in column.texts})))


def _renumbered(contents: Contents[object], table: Table) -> Contents[object]:
    """Return contents whose texts have the numbers of another table."""
    assert contents.table is not None, "all files have one"
    lookups = {}
    for at, (before, after) in enumerate(zip(contents.table.columns, table.columns, strict=True)):
        if after.kind == TEXT and before.texts != after.texts:
            numbers = {text: number for number, text in enumerate(after.texts)}
            lookups[at] = np.array([*(numbers[text] for text in before.texts), np.nan])

    def change(rows: Array) -> Array:
        for at, lookup in lookups.items():
            rows[:, at] = lookup[np.nan_to_num(rows[:, at], nan=-1).astype(np.int64)]
        return rows

    parts = {part: (_changed(x, change), y) for part, (x, y) in contents.parts.items()}
    return replace(contents, parts=parts, table=table)


def _changed(rows: object, change: Callable[[Array], Array]) -> Rows:
    if isinstance(rows, StoredRows):
        return rows.changed(rows.shape[1:], change)
    return change(as_array(rows, "table"))
