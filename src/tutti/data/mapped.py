"""The samples in NPY files, mapped into memory: the operating system reads what is used, once per host."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from typing_extensions import override

from tutti.data.rows import Array, Indices, StoredRows
from tutti.errors import BadData


class Mapped(StoredRows):
    """The samples in some NPY files, one after the other.

    Args:
        paths: of the files.
        layout: changes the shape of some samples; None: they stay as they are. It can be pickled.

    Raises:
        BadData: a file has samples of another shape or type than the first.
    """

    def __init__(self, paths: Sequence[Path], layout: Callable[[Array], Array] | None = None) -> None:
        self.paths, self.layout = list(paths), layout
        self.arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in self.paths]
        first = self.arrays[0]
        for path, array in zip(self.paths, self.arrays, strict=True):
            if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
                raise BadData(
                    f"{path} has samples of the shape {array.shape[1:]} and type {array.dtype}, "
                    f"{self.paths[0]} of {first.shape[1:]} and {first.dtype}; all files of an array need "
                    "the same"
                )
        self._ends = np.array([*accumulate(map(len, self.arrays))])
        self._starts = self._ends - [len(array) for array in self.arrays]
        one = first[:1] if layout is None else layout(first[:1])
        super().__init__((int(self._ends[-1]), *one.shape[1:]), first.dtype, self._stretch)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return Mapped, (self.paths, self.layout)

    @override
    def changed(self, shape: tuple[int, ...], change: Callable[[Array], Array]) -> Mapped:
        return Mapped(self.paths, change)

    @override
    def __getitem__(self, wanted: slice | Indices) -> Array:
        """Read a stretch, or the samples of some numbers in any order."""
        return super().__getitem__(wanted) if isinstance(wanted, slice) else self._take(wanted)

    def _take(self, numbers: Indices) -> Array:
        if len(self.arrays) == 1:
            found = np.asarray(self.arrays[0][numbers])
        else:
            found = np.empty((len(numbers), *self.arrays[0].shape[1:]), self.dtype)
            files = self._ends.searchsorted(numbers, "right")
            for file in np.unique(files):
                own = files == file
                found[own] = self.arrays[file][numbers[own] - self._starts[file]]
        return found if self.layout is None else self.layout(found)

    def _stretch(self, start: int, stop: int) -> Array:
        if len(self.arrays) > 1:
            return self._take(np.arange(start, max(start, stop)))
        found = np.asarray(self.arrays[0][start:stop])
        return found if self.layout is None else self.layout(found)

    def read_ahead(self, start: int, stop: int) -> None:
        """Let the operating system begin to read the samples from one number up to another."""
        for number in range(bisect_right(self._ends, start), len(self.arrays)):
            array, begin = self.arrays[number], int(self._starts[number])
            if begin >= stop:
                break
            low, high = max(start, begin) - begin, min(stop, int(self._ends[number])) - begin
            each = array.nbytes // len(array)
            header = self.paths[number].stat().st_size - array.nbytes
            file = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, header + low * each, (high - low) * each, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)
