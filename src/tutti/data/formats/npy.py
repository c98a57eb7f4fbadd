"""NPY files: one array in each, the inputs in one file and the targets in another."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.contents import EXTRA_KEYS, Contents, from_keys, slot_of
from tutti.data.formats import Format, in_order
from tutti.data.rows import Array, Indices, Rows, StoredRows
from tutti.data.tables import listed
from tutti.errors import BadData
from tutti.records.npz import DAMAGED, damaged, open_data_file
from tutti.registry import part

_SHARD: Final = re.compile(r"(.+?)-\d{1,9}(?:-of-\d{1,9})?")
"""Such as x_train-00003-of-00012, or x_train-3."""


@part("NPY")
class Npy(Format):
    """NPY files, as of `numpy.save`: x.npy and y.npy, or a folder of x_train.npy, y_train.npy, ...

    An array may be in several files, called x_train-00000.npy, x_train-00001.npy, ..., or with their number,
    as in x_train-00000-of-00012.npy.
    """

    start = b"\x93NUMPY"

    @staticmethod
    @override
    def in_folder(folder: Path) -> bool:
        return any(folder.glob("*.npy"))

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        """Map a pair of files, or a folder of them, to read on demand."""
        if path.is_dir():
            found = {key: joined_files(files) for key, files in files_by_key(path).items()}
            return from_keys(found, path.resolve().name, str(path), labelled)
        if not labelled:
            return Contents(path.stem, {"train": (read_npy(path), None)})
        slots = {slot_of(file.stem): file for file in sorted(path.parent.glob("*.npy"))}
        name, kind = slot_of(path.stem) or ("", "")
        if kind != "inputs" or (name, "targets") not in slots:
            there = listed(sorted(file.name for file in slots.values()))
            raise BadData(
                f"{path} has no targets beside it that are called alike: its folder has {there}; call a pair "
                "x.npy and y.npy"
            )
        parts = {"train": (read_npy(path), read_npy(slots[name, "targets"]))}
        weights = slots.get((name, "weights"))
        return Contents(path.stem, parts, weights={} if weights is None else {"train": read_npy(weights)})


def files_by_key(folder: Path) -> dict[str, list[Path]]:
    """Return the NPY files of a data set in a folder, by their keys, in the order of the samples."""
    found: dict[str, list[Path]] = {}
    for file in folder.glob("*.npy"):
        match = _SHARD.fullmatch(file.stem)
        key = match[1] if match else file.stem
        if slot_of(key) is not None or key in EXTRA_KEYS:
            found.setdefault(key, []).append(file)
    for key, files in found.items():
        if len(files) > 1 and folder / f"{key}.npy" in files:
            raise BadData(f"{folder} has {key}.npy and {key}-...; keep one of these forms")
    return {key: in_order(files) for key, files in found.items()}


def joined_files(files: Sequence[Path]) -> Rows:
    """Map the arrays of several files as one; all samples have one shape."""
    first = read_npy(files[0])
    if first.ndim and first.dtype.kind in "biuf":
        return Mapped(files)
    return first if len(files) == 1 else np.concatenate([read_npy(file) for file in files])


class Mapped(StoredRows):
    """The samples in some NPY files, one after the other; BadData if their shapes or dtypes differ.

    `layout` changes the shape of some samples; it can be pickled.
    """

    def __init__(self, paths: Sequence[Path], layout: Callable[[Array], Array] | None = None) -> None:
        self.paths, self.layout = list(paths), layout
        self.arrays = [read_npy(path) for path in self.paths]
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
        """Read a stretch, or the samples with some numbers in any order."""
        return super().__getitem__(wanted) if isinstance(wanted, slice) else self._take(wanted)

    def _take(self, numbers: Indices) -> Array:
        if len(self.arrays) == 1:
            rows = np.asarray(self.arrays[0][numbers])
        else:
            rows = np.empty((len(numbers), *self.arrays[0].shape[1:]), self.dtype)
            files = self._ends.searchsorted(numbers, "right")
            for file in np.unique(files):
                own = files == file
                rows[own] = self.arrays[file][numbers[own] - self._starts[file]]
        return rows if self.layout is None else self.layout(rows)

    def _stretch(self, start: int, stop: int) -> Array:
        if len(self.arrays) > 1:
            return self._take(np.arange(start, max(start, stop)))
        rows = np.asarray(self.arrays[0][start:stop])
        return rows if self.layout is None else self.layout(rows)

    def read_ahead(self, start: int, stop: int) -> None:
        """Ask the operating system to begin to read a stretch of samples."""
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


def read_npy(path: Path) -> Array:
    """Map the array in an NPY file into memory. Nothing is unpickled."""
    with open_data_file(path):
        pass
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except DAMAGED as error:
        raise damaged(path, error) from error
