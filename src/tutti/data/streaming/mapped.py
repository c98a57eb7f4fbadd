"""The samples in one or several NPY files, mapped into memory: the operating system reads what is used.

All processes of a host share what was read, in its cache, which it gives up where memory is short.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from typing_extensions import override

from tutti.data.formats.npy import read_npy
from tutti.data.rows import Array, Indices, StoredRows
from tutti.errors import BadData


class Mapped(StoredRows):
    """The samples in some NPY files, one after the other.

    Args:
        paths: of the files.

    Raises:
        BadData: a file is missing or broken, or has samples of another shape or type than the first.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.arrays = [read_npy(path) for path in self.paths]
        first = self.arrays[0]
        for path, array in zip(self.paths, self.arrays, strict=True):
            if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
                raise BadData(
                    f"{path} has samples of the shape {array.shape[1:]} and type {array.dtype}, "
                    f"{self.paths[0]} of {first.shape[1:]} and {first.dtype}; all files of an array need "
                    "the same"
                )
            if not array.flags.c_contiguous:
                raise BadData(
                    f"{path} has its values in Fortran's order, in which no sample is in one piece; save "
                    "numpy.ascontiguousarray(array)"
                )
        self._ends = np.array([*accumulate(map(len, self.arrays))])
        self._starts = self._ends - [len(array) for array in self.arrays]
        super().__init__((int(self._ends[-1]), *first.shape[1:]), first.dtype, self._stretch)

    @override
    def __reduce__(self) -> tuple[type[Mapped], tuple[list[Path]]]:
        return Mapped, (self.paths,)

    def take(self, numbers: Indices) -> Array:
        """Return the samples of some numbers, in any order."""
        if len(self.arrays) == 1:
            return np.asarray(self.arrays[0][numbers])
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        files = self._ends.searchsorted(numbers, "right")
        for file in np.unique(files):
            own = files == file
            found[own] = self.arrays[file][numbers[own] - self._starts[file]]
        return found

    def expect(self, start: int, stop: int) -> None:
        """Have the operating system begin to read the samples from one number up to another."""
        for number in range(bisect_right(self._ends, start), len(self.arrays)):
            array, begin = self.arrays[number], int(self._starts[number])
            if begin >= stop:
                break
            low, high = max(start, begin) - begin, min(stop, int(self._ends[number])) - begin
            each = array.itemsize * array[0].size
            header = self.paths[number].stat().st_size - array.nbytes
            file = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, header + low * each, (high - low) * each, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def _stretch(self, start: int, stop: int) -> Array:
        return self.take(np.arange(start, max(start, stop)))
