"""NPY files: one array in each, of which one holds the inputs and another the targets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.contents import EXTRA_KEYS, Contents, from_keys, slot_of
from tutti.data.formats import Format, in_order, listed
from tutti.data.rows import Array, Rows, StoredRows, joined
from tutti.errors import BadData
from tutti.records.npz import DAMAGED, damaged, open_data_file
from tutti.registry import part

MAPPED: Final = 64
"""The files that are mapped at once, at most: each takes one of the open files that a process may have."""

_SHARD: Final = re.compile(r"(.+?)-\d{1,9}(?:-of-\d{1,9})?")
"""Such as x_train-00003-of-00012, or x_train-3."""


@part("NPY")
class Npy(Format):
    """NPY files, as of `numpy.save`: x.npy and y.npy, or a folder of x_train.npy, y_train.npy, ...

    An array may be in several files, called x_train-00000.npy, x_train-00001.npy, ..., also with their number
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
        """Read a pair of files, or a folder of them; they are mapped, and read when they are needed."""
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
        return Contents(path.stem, {"train": (read_npy(path), read_npy(slots[name, "targets"]))})


def files_by_key(folder: Path) -> dict[str, list[Path]]:
    """Return the NPY files of a data set in a folder, by their keys, in the order of the samples.

    Raises:
        BadData: one of several files of an array is missing, or it is there in two forms.
    """
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
    """Map the arrays of several files, of which each sample has one shape, as one.

    Raises:
        BadData: a file is missing or broken, or has samples of another shape or type than the first.
    """
    pieces: list[Rows] = []
    for file in files:
        array = read_npy(file)
        first = pieces[0] if pieces else array
        texts = array.dtype.kind == first.dtype.kind == "U"
        if array.shape[1:] != first.shape[1:] or not (texts or array.dtype == first.dtype):
            raise BadData(
                f"{file} has samples of the shape {array.shape[1:]} and type {array.dtype}, {files[0]} of "
                f"{first.shape[1:]} and {first.dtype}; all files of an array need the same"
            )
        pieces.append(array if len(files) <= MAPPED else _mapped_when_read(file, array))
    return joined(pieces, np.result_type(*(one.dtype for one in pieces))) if len(files) > 1 else pieces[0]


def _mapped_when_read(file: Path, array: Array) -> StoredRows:
    """Return the samples of a file that is mapped for each reading."""
    return StoredRows(array.shape, array.dtype, lambda start, stop: np.array(read_npy(file)[start:stop]))


def read_npy(path: Path) -> Array:
    """Map the array in an NPY file into memory. Nothing is unpickled.

    Raises:
        BadData: the file is missing, truncated or no NPY file, or holds Python objects.
    """
    with open_data_file(path):
        pass
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        if "Python objects" in str(error) or "pickle" in str(error):
            raise BadData(
                f"{path} holds Python objects, which are not loaded because unpickling runs code; save it as "
                "numbers: array.astype('float32') or array.astype('int64')"
            ) from error
        raise damaged(path, error) from error
    if not isinstance(array, np.ndarray):
        raise BadData(f"{path} is no NPY file but an archive; call it .npz")
    return np.asarray(array)
