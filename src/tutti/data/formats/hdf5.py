"""HDF5 files: inputs and targets are data sets in them, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from tutti.data.contents import EXTRA_KEYS, Contents, from_keys, slot_of
from tutti.data.formats import Format
from tutti.data.rows import Array, StoredRows
from tutti.data.structure import sequence_column
from tutti.data.tables import listed, names_of
from tutti.errors import BadData, BadOption
from tutti.load_object import optional_package
from tutti.records.npz import damaged, open_data_file
from tutti.registry import part


@part("HDF5")
class Hdf5(Format):
    """HDF5 files; `--data.features` and `--data.labels` name the data sets in them, such as events/jets."""

    start = b"\x89HDF\r\n\x1a\n"
    options = ("features", "labels", "group", "weight")

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        """Open a file. Its inputs are read on demand.

        Several features of one number for each sample are columns of one table, others are several inputs,
        named by the ends of their names. Without names, x_train, y_train and the like are used.
        """
        with open_data_file(path):
            pass
        features, labels, group, weight = (options.get(name) for name in Hdf5.options)
        try:
            with optional_package("h5py", "HDF5 files need").File(path, "r") as file:
                groups = _rows(path, file, group)[:] if group is not None and labelled else None
                given = {"train": _rows(path, file, weight)} if weight is not None and labelled else {}
                if features is not None and (labels is not None or not labelled):
                    targets = _several(path, file, labels) if labelled else None
                    if targets is not None and features == labels:
                        raise BadOption(f"'{features}' is input and target at once; give other --data.labels")
                    parts = {"train": (_several(path, file, features), targets)}
                    called = tuple(map(str, names_of(labels, _names(file)))) if labelled else ()
                    return Contents(path.stem, parts, targets=called, groups=groups, weights=given)
                keys = [name for name in file if slot_of(name) is not None or name in EXTRA_KEYS]
                slots = {slot[1] for slot in map(slot_of, keys) if slot is not None}
                lacks = {"inputs", *(["targets"] if labelled else [])} - slots
                if lacks or features is not None or (labels is not None and labelled):
                    for name in filter(None, (features, labels)):
                        _several(path, file, name)  # refuses a wrong name
                    raise BadData(
                        f"name the inputs and the targets of {path} by --data.features NAME --data.labels "
                        f"NAME; it has {_data_sets(file)}"
                    )
                found = {name: _rows(path, file, name) for name in keys}
                found |= {f"w_{part}": one for part, one in given.items()}
                return replace(from_keys(found, path.stem, str(path), labelled), groups=groups)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
            raise damaged(path, error) from error


_File: TypeAlias = Any
"""A file as h5py has opened it."""


def _names(file: _File) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the data sets of a file by name, including nested groups."""
    import h5py

    found = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            found[name] = tuple(item.shape)

    file.visititems(note)
    return found


def _data_sets(file: _File) -> str:
    return listed([f"{name} {shape}" for name, shape in _names(file).items()]) or "no data sets"


def _several(path: Path, file: _File, wanted: object) -> object:
    """Return a data set, or several: as a table if each has one number for each sample, else by name."""
    names = [str(one).strip("/") for one in names_of(wanted, _names(file))]
    rows = [_rows(path, file, name) for name in names]
    if len(rows) == 1:
        return rows[0]
    if all(isinstance(one, StoredRows) and one.shape == rows[0].shape[:1] for one in rows):
        dtype = np.result_type(*(one.dtype for one in rows if isinstance(one, StoredRows)))

        def read(start: int, stop: int) -> Array:
            return np.stack([one[start:stop] for one in rows], axis=1)

        return StoredRows((*rows[0].shape, len(rows)), dtype, read)
    by_word = {name.rpartition("/")[2]: one for name, one in zip(names, rows, strict=True)}
    if len(by_word) < len(rows):
        raise BadData(
            f"{path} has inputs that are called alike: {', '.join(names)}; a model needs their names"
        )
    return by_word


def _rows(path: Path, file: _File, wanted: object) -> Any:
    """Return a data set: numbers that are read on demand, texts, or sequences."""
    import h5py

    name = str(wanted).strip("/")
    if name not in _names(file):
        raise BadData(f"{path} has no data set '{wanted}'; it has {_data_sets(file)}")
    stored = file[name]
    if h5py.check_string_dtype(stored.dtype) is not None:
        return np.asarray(stored.asstr()[...], dtype=str)
    if h5py.check_vlen_dtype(stored.dtype) is not None:
        each = stored[...]
        return sequence_column(np.concatenate(each), np.array([len(one) for one in each], np.int64))
    if stored.dtype.kind not in "biuf":
        raise BadData(f"{path} has neither numbers nor texts in '{name}', but {stored.dtype}; choose others")
    if not stored.shape:
        return np.asarray(stored[...])
    # A file may have its numbers in the order of bytes of another machine.
    dtype = stored.dtype.newbyteorder("=")

    def read(start: int, stop: int) -> Array:
        try:
            with h5py.File(path, "r") as again:
                rows: Array = again[name][start:stop]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise damaged(path, error) from error
        return rows.astype(dtype, copy=False)

    return StoredRows(tuple(stored.shape), dtype, read)
