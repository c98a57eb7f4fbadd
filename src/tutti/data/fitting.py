"""The preparation of a table, fitted on its training rows in one pass over them.

A column is left out if it tells nothing of rows that training has not seen: one value, no value, the numbers
of the rows, or nearly as many texts as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tutti.data.columns import Columns
from tutti.data.contents import ReadData
from tutti.data.preparation import GAP, date_parts
from tutti.data.rows import Array, Indices
from tutti.errors import BadData
from tutti.records.preparation import (
    DATE,
    EMPTY,
    FLAG,
    NUMBER,
    TEXT,
    Preparation,
    PreparedColumn,
    Table,
    TableColumn,
)

ONE_HOT: Final = 30
"""The most texts of a column that get a flag each."""

_KEY_SHARE: Final = 0.9
"""A column with more different texts than this share of its rows is a key."""

_LEAST_ROWS: Final = 30
"""Of fewer rows, different whole numbers are not taken for row numbers."""

_RARE: Final = 2
"""A text with fewer rows has no category number of its own."""

_MEDIAN_ROWS: Final = 1 << 18
"""Medians are those of evenly spaced rows, at most about as many as these."""

_CHUNK: Final = 1 << 18
"""Values that are looked at at once."""

CONSTANT: Final = "constant"
MISSING: Final = "all missing"
ROW_NUMBERS: Final = "row numbers"
KEY: Final = "nearly as many texts as rows"
"""Reasons to leave a column out."""


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
        rows: those to fit it on.
        table: the columns.
        samples: all rows, which row numbers count.
        by_mean: means stand for missing numbers, not medians.
        embeds: the model takes category numbers for columns of many texts.

    Raises:
        BadData: no column is left.
    """
    found = _Statistics(table)
    step = max(1, _CHUNK // max(1, len(table.columns)))
    for start in range(0, len(rows), step):
        found.add(read(rows[start : start + step]))
    some = read(rows[:: -(-len(rows) // _MEDIAN_ROWS)])
    columns: list[PreparedColumn] = []
    numbered: list[PreparedColumn] = []
    left_out = dict(table.left_out)
    for number, column in enumerate(table.columns):
        if number in found.counts:
            made = _of_codes(column, found.counts[number], embeds, table.chosen)
        else:
            made = _of_numbers(column, found, number, some[:, number], by_mean)
        if isinstance(made, str):
            left_out[column.name] = made
        elif not table.chosen and _counts_rows(found, number, read, rows, samples):
            left_out[column.name] = ROW_NUMBERS
            numbered.append(made)
        else:
            columns.append(made)
    if not columns and numbered:
        columns = numbered
        left_out = {name: why for name, why in left_out.items() if why != ROW_NUMBERS}
    if not columns:
        told = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        raise BadData(
            f"no column of the table is of use as an input: {told}; add others, or name those to be used by "
            "--data.columns"
        )
    return Preparation(tuple(columns), left_out, by_mean)


def preparation_of(contents: ReadData, embeds: bool = False) -> Preparation | None:
    """Return the preparation of a table whose training samples are all trained on; None: it is no table."""
    rows, targets = contents.parts["train"]
    if contents.table is None or isinstance(rows, Columns):
        return None
    whole, count = rows[:], len(targets)
    return fit(whole.__getitem__, np.arange(count), contents.table, count, contents.filled, embeds)


def _of_numbers(
    column: TableColumn, found: _Statistics, number: int, some: Array, by_mean: bool
) -> PreparedColumn | str:
    """Return how numbers or dates are prepared, or why not; `some` are for the median."""
    places = found.places(number)
    known = int(found.known[places[0]])
    if not known:
        return MISSING
    gaps = known < found.rows
    if found.least[places[0]] == found.most[places[0]] and not gaps:
        return CONSTANT
    mean, std = found.line(places)
    there = some[~np.isnan(some)]
    fill = mean[0] if by_mean or not len(there) else float(np.median(there))
    return PreparedColumn(column.name, column.kind, fill, mean, std, gaps, form=column.form)


def _of_codes(
    column: TableColumn, counts: NDArray[np.int64], embeds: bool, chosen: bool
) -> PreparedColumn | str:
    """Return how texts or flags are prepared, or why not."""
    counts, gaps = counts[1:], bool(counts[0])
    different = int((counts > 0).sum())
    if not different:
        return MISSING
    if different == 1 and not gaps:
        return CONSTANT
    if column.kind == FLAG:
        return PreparedColumn(column.name, FLAG, gaps=gaps)
    many = different > ONE_HOT
    if many and different > _KEY_SHARE * counts.sum() and not chosen:
        return KEY
    embedded = many and embeds
    if embedded:
        numbers = np.flatnonzero(counts >= _RARE)
    elif many:
        numbers = np.argsort(-counts, kind="stable")[:ONE_HOT]
    else:
        numbers = np.flatnonzero(counts)
    categories = tuple(column.texts[number] for number in numbers)
    others = many and not embedded
    return PreparedColumn(
        column.name, TEXT, gaps=gaps, categories=categories, others=others, embedded=embedded
    )


def _counts_rows(
    found: _Statistics, number: int, read: Callable[[Indices], Array], rows: Indices, samples: int
) -> bool:
    """Return whether a column of numbers has other whole numbers in all rows, up to the number of samples."""
    if number not in found.plain or not _LEAST_ROWS <= len(rows) <= samples <= 2 * len(rows):
        return False
    (place,) = found.places(number)
    outside = found.least[place] < 0 or found.most[place] > samples
    if outside or found.known[place] < len(rows):
        return False
    seen = np.zeros(samples + 1, np.bool_)
    step = max(1, _CHUNK // (len(found.known) + len(found.counts)))
    for start in range(0, len(rows), step):
        some = read(rows[start : start + step])[:, number]
        whole = some.astype(np.int64)
        if (whole != some).any() or len(np.unique(whole)) < len(whole):
            return False
        seen[whole] = True
    return bool(seen.sum() == len(rows))


class _Statistics:
    """Statistics of the columns of a table, whose rows come some at a time.

    Numbers are described together: the columns of numbers, then the days, the years and the hours of dates.
    """

    def __init__(self, table: Table) -> None:
        kinds = [column.kind for column in table.columns]
        self.plain = [at for at, kind in enumerate(kinds) if kind in (NUMBER, EMPTY)]
        self._dates = [at for at, kind in enumerate(kinds) if kind == DATE]
        size = len(self.plain) + 3 * len(self._dates)
        self._shift, self._sums, self._squares = np.zeros((3, size))
        self.least, self.most = np.full(size, np.inf), np.full(size, -np.inf)
        self.known = np.zeros(size, np.int64)
        self.counts = {
            at: np.zeros(1 + (len(column.texts) if column.kind == TEXT else 2), np.int64)
            for at, column in enumerate(table.columns)
            if column.kind in (TEXT, FLAG)
        }
        self.rows = 0

    def add(self, rows: Array) -> None:
        """Add some rows, of shape (rows, columns)."""
        codes = np.ascontiguousarray(rows[:, [*self.counts]].T)
        codes = np.where(np.isnan(codes), GAP, codes).astype(np.int64) - GAP
        for counts, some in zip(self.counts.values(), codes, strict=True):
            counts += np.bincount(some, minlength=len(counts))
        values = self._numbers(rows)
        there = ~np.isnan(values)
        known = there.sum(axis=1)
        if not self.rows:
            # Squares around 0 lose all digits where the mean is large.
            self._shift = np.where(there, values, 0).sum(axis=1) / np.maximum(1, known)
        self.least = np.fmin(self.least, np.fmin.reduce(values, axis=1))
        self.most = np.fmax(self.most, np.fmax.reduce(values, axis=1))
        around = values - self._shift[:, None]
        if known.min(initial=len(rows)) < len(rows):
            around = np.where(there, around, 0)
        self._sums += around.sum(axis=1)
        self._squares += np.einsum("cr,cr->c", around, around)
        self.known += known
        self.rows += len(rows)

    def _numbers(self, rows: Array) -> Array:
        days = np.ascontiguousarray(rows[:, self._dates].T, np.float64)
        years, hours, *_ = date_parts(torch.from_numpy(np.nan_to_num(days)))
        parts = [np.where(np.isnan(days), np.nan, one) for one in (days, years.numpy(), hours.numpy())]
        return np.concatenate([np.ascontiguousarray(rows[:, self.plain].T, np.float64), *parts])

    def places(self, number: int) -> list[int]:
        """Return where a column of numbers or dates is among the numbers."""
        if number in self.plain:
            return [self.plain.index(number)]
        first = len(self.plain) + self._dates.index(number)
        places = [first, first + len(self._dates), first + 2 * len(self._dates)]
        return places if self.most[places[-1]] > 0 else places[:-1]

    def line(self, places: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return means and deviations; 1 is the deviation of what never varies."""
        means = self._sums[places] / np.maximum(1, self.known[places])
        variances = self._squares[places] / np.maximum(1, self.known[places]) - means**2
        varies = (self.least[places] < self.most[places]) & (variances > 0)
        stds = np.where(varies, np.sqrt(np.maximum(variances, 0)), 1)
        return tuple((means + self._shift[places]).tolist()), tuple(stds.tolist())
