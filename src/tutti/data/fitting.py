"""The preparation of a table, fitted on its training rows.

A column is left out if it says nothing about rows outside training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch

from tutti.data.columns import Columns
from tutti.data.contents import ReadData
from tutti.data.preparation import date_parts
from tutti.data.rows import Array, Indices
from tutti.errors import BadData
from tutti.records.preparation import (
    DATE,
    NUMBER,
    TEXT,
    Preparation,
    PreparedColumn,
    Table,
    TableColumn,
)

CONSTANT: Final = "constant"
MISSING: Final = "all missing"
ROW_NUMBERS: Final = "row numbers"
IDENTIFIER: Final = "an identifier"
KEY: Final = "nearly as many texts as rows"
SIGNED: Final = "numbers with signs such as $"
"""Reasons to leave a column out."""

_SIGN: Final = re.compile(r"\d.*[$€£¥%]|[$€£¥%].*\d")
_NAMES: Final = re.compile(r"(?:^|[^A-Za-z]|(?<=[a-z])(?=[A-Z]))(?i:id|no|nr|number|key|code)$")
"""The names of identifiers, such as user_id, CustomerId and Order No."""

ONE_HOT: Final = 30
"""The most texts of a column that get a flag each."""

_MEDIAN_ROWS: Final = 1 << 18
"""Medians are those of evenly spaced rows, at most about as many as these."""

_AT_ONCE: Final = 1 << 28
"""Values that are copied at once, so that those of a column lie side by side ..."""

_CACHED: Final = 1 << 16
"""... by blocks that stay in the processor's cache."""


def fit(
    read: Callable[[Indices], Array],
    rows: Indices,
    table: Table,
    samples: int,
    by_mean: bool = False,
    embeds: bool = False,
) -> Preparation:
    """Fit the preparation of a table.

    Args:
        read: returns some rows, floats of shape (rows, columns).
        rows: the rows to fit it on.
        table: the columns.
        samples: the number of all rows, which row numbers count.
        by_mean: replace missing numbers by means instead of medians.
        embeds: the model takes category numbers for columns of many texts.
    """
    columns: list[PreparedColumn] = []
    numbered: list[PreparedColumn] = []
    left_out = dict(table.left_out)
    for column, values in zip(table.columns, _columns(read, rows, len(table.columns)), strict=True):
        missing = np.isnan(values)
        gaps = bool(missing.any())
        known = values[~missing] if gaps else values
        if not len(known):
            left_out[column.name] = MISSING
        elif not gaps and known.min() == known.max():
            left_out[column.name] = CONSTANT
        elif column.kind == TEXT and not table.chosen and _is_key(known):
            left_out[column.name] = SIGNED if all(map(_SIGN.search, column.texts[:100])) else KEY
        elif column.kind == TEXT:
            columns.append(_of_texts(column, known, gaps, embeds))
        elif not (table.chosen or gaps or column.kind != NUMBER) and (
            why := _why_no_amounts(column.name, known, samples)
        ):
            left_out[column.name] = why
            numbered.append(_of_numbers(column, known, gaps, by_mean))
        else:
            columns.append(_of_numbers(column, known, gaps, by_mean))
    if not columns:
        kept = {column.name for column in numbered}
        columns, left_out = numbered, {name: why for name, why in left_out.items() if name not in kept}
    if not columns:
        told = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        raise BadData(f"no column of the table is of use as an input: {told}; name others by --data.columns")
    return Preparation(tuple(columns), left_out, by_mean)


def preparation_of(contents: ReadData, embeds: bool = False) -> Preparation | None:
    """Return the preparation of a table whose training samples are all trained on; None: it is no table."""
    rows, targets = contents.parts["train"]
    if contents.table is None or isinstance(rows, Columns):
        return None
    whole, count = rows[:], len(targets)
    return fit(whole.__getitem__, np.arange(count), contents.table, count, contents.filled, embeds)


def _columns(read: Callable[[Indices], Array], rows: Indices, count: int) -> Iterator[Array]:
    """Yield the values of each column."""
    width, step = max(1, _AT_ONCE // len(rows)), max(1, _CACHED // count)
    for first in range(0, count, width):
        columns = np.empty((min(width, count - first), len(rows)), read(rows[:1]).dtype)
        for start in range(0, len(rows), step):
            block = read(rows[start : start + step])
            columns[:, start : start + step] = block[:, first : first + width].T
        yield from columns


def _of_numbers(column: TableColumn, known: Array, gaps: bool, by_mean: bool) -> PreparedColumn:
    """Return the preparation of numbers or dates."""
    amounts = [known]
    if column.kind == DATE:
        year, hour, *_ = date_parts(torch.from_numpy(known)[:, None])
        amounts += [part[:, 0].numpy() for part in (year, hour) if part is year or part.any()]
    means = [float(one.mean(dtype=np.float64)) for one in amounts]
    stds = [float(one.std(dtype=np.float64)) or 1.0 for one in amounts]
    some = known[:: -(-len(known) // _MEDIAN_ROWS)]
    fill = means[0] if by_mean else float(np.median(some))
    return PreparedColumn(column.name, column.kind, fill, tuple(means), tuple(stds), gaps, form=column.form)


def _of_texts(column: TableColumn, known: Array, gaps: bool, embeds: bool) -> PreparedColumn:
    """Return the preparation of texts."""
    counts = np.bincount(known.astype(np.int64))
    many = int((counts > 0).sum()) > ONE_HOT
    # A text of a single row has no category number of its own: so the number of all others is trained, too.
    numbers = np.flatnonzero(counts >= 2 if many and embeds else counts)
    if many and not embeds:
        numbers = np.argsort(-counts, kind="stable")[:ONE_HOT]
    categories = tuple(column.texts[number] for number in numbers)
    others, embedded = many and not embeds, many and embeds
    return PreparedColumn(
        column.name, TEXT, gaps=gaps, categories=categories, others=others, embedded=embedded
    )


def _is_key(known: Array) -> bool:
    """Return whether nearly every row has a different text, with too many for columns of flags."""
    different = int((np.bincount(known.astype(np.int64)) > 0).sum())
    return different > max(ONE_HOT, 0.9 * len(known))


def _why_no_amounts(name: str, known: Array, samples: int) -> str | None:
    """Return `ROW_NUMBERS` or `IDENTIFIER` for distinct whole numbers; None: they may be amounts."""
    enough = 30 <= len(known) <= samples <= 2 * len(known)  # of fewer rows, amounts may be so
    if not enough or (known != np.floor(known)).any():
        return None
    if (np.diff(known) > 0).all():
        return ROW_NUMBERS
    within = known.min() >= 0 and known.max() <= samples
    if within and np.bincount(known.astype(np.int64)).max() == 1:
        return ROW_NUMBERS
    # As float32 a few may be the same.
    return IDENTIFIER if _NAMES.search(name) and len(np.unique(known)) > 0.9 * len(known) else None
