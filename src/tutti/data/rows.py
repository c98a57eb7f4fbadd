"""Inputs that are read on demand, so that memory holds them once, where all ranks see them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Indices = NDArray[np.int64]


def rows_of_kept(samples: Indices, left_out: Indices) -> Indices:
    """Return the rows of a source that some samples are, numbered without the rows that are left out."""
    return samples + np.searchsorted(left_out - np.arange(len(left_out)), samples, side="right")


class StoredRows:
    """Samples in a file, or in several pieces of memory.

    Args:
        shape: the number of samples, and the shape of one.
        dtype: of a value.
        read: (start, stop) -> the samples between.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[int, int], Array]
    ) -> None:
        self.shape, self.dtype, self._read = shape, np.dtype(dtype), read

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, wanted: slice | Indices) -> Array:
        """Read some samples: a stretch, or ascending numbers."""
        if isinstance(wanted, slice):
            start, stop, step = wanted.indices(len(self))
            return self._read(start, max(start, stop))[::step]
        rows = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        for run in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(wanted) != 1) + 1):
            if len(run):
                rows[run] = self._read(int(wanted[run[0]]), int(wanted[run[-1]]) + 1)
        return rows

    def changed(self, shape: tuple[int, ...], change: Callable[[Array], Array]) -> StoredRows:
        """Return the samples in another shape, which `change` gives to some of them."""
        return StoredRows(
            (len(self), *shape), self.dtype, lambda start, stop: change(self._read(start, stop))
        )


Rows: TypeAlias = Array | StoredRows
"""Samples: an array, or what reads one."""


def joined(pieces: Sequence[Rows], dtype: np.dtype[Any] | None = None) -> Rows:
    """Return several pieces as one, of one dtype; all samples have one shape."""
    first = pieces[0]
    dtype = dtype or first.dtype
    if len(pieces) == 1 and first.dtype == dtype:
        return first
    ends = list(accumulate(map(len, pieces)))

    def read(start: int, stop: int) -> Array:
        found = np.empty((max(0, stop - start), *first.shape[1:]), dtype)
        for number in range(bisect_right(ends, start), len(pieces)):
            piece, begin = pieces[number], ends[number] - len(pieces[number])
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, ends[number])
            found[low - start : high - start] = piece[low - begin : high - begin]
        return found

    return StoredRows((ends[-1], *first.shape[1:]), dtype, read)


def chosen(rows: Rows, numbers: Indices) -> Rows:
    """Return the samples with some ascending numbers, without copying yet."""
    if len(numbers) == len(rows):
        return rows
    return StoredRows(
        (len(numbers), *rows.shape[1:]), rows.dtype, lambda start, stop: rows[numbers[start:stop]]
    )
