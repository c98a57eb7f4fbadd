"""HDF5 files: inputs and targets are data sets in them, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from tutti.data.arrays import CHUNK, chunks_of
from tutti.data.columns import Stored
from tutti.data.contents import EXTRA_KEYS, Contents, from_keys, slot_of, to_keys
from tutti.data.formats import Format, listed
from tutti.data.rows import Array, Rows, StoredRows
from tutti.errors import BadData
from tutti.load_object import optional_package
from tutti.records.npz import damaged, open_data_file, refuse_larger_than_memory
from tutti.registry import part


@part("HDF5")
class Hdf5(Format):
    """HDF5 files; `--data.features` and `--data.labels` name the data sets in them, such as events/jets."""

    start = b"\x89HDF\r\n\x1a\n"
    written = ".h5"

    @staticmethod
    def read(
        path: Path,
        features: str | list[str] | None = None,
        labels: str | list[str] | None = None,
        labelled: bool = True,
        group: object = None,
    ) -> Contents[object]:
        """Open a file. Its inputs are read when they are needed.

        Args:
            path: of the file.
            features: the name of the inputs; several of one number for each sample are columns of one table,
                others are several inputs, called as the ends of their names.
            labels: that of the targets; without the two, names such as x_train and y_train say what is what.
            labelled: whether there must be targets.
            group: the data set with the group of each sample, which is never an input by itself.
        """
        with open_data_file(path):
            pass
        try:
            with optional_package("h5py", "HDF5 files").File(path, "r") as file:
                names = _names(file)
                groups = _targets(path, names, str(group)) if group is not None and labelled else None
                if features is not None and not labelled:
                    return Contents(path.stem, {"train": (_features(path, names, features), None)})
                if labelled and (features is None) != (labels is None):
                    given, other = ("features", "labels") if labels is None else ("labels", "features")
                    raise BadData(
                        f"--data.{given} is given, so --data.{other} is needed, too; {path} has {_all(names)}"
                    )
                if features is not None:
                    inputs = _features(path, names, features)
                    parts = {"train": (inputs, _targets(path, names, labels))}
                    return Contents(path.stem, parts, groups=groups)
                words = {name: name.rpartition("/")[2] for name in names}
                _refuse_alike(path, words)
                found: dict[str, object] = {
                    word: _inputs(path, names, name) if slot[1] == "inputs" else _targets(path, names, name)
                    for name, word in words.items()
                    if (slot := slot_of(word)) is not None and (labelled or slot[1] == "inputs")
                }
                if found:
                    extra = {word: name for name, word in words.items() if word in EXTRA_KEYS}
                    found |= {word: _targets(path, names, name) for word, name in extra.items()}
                else:
                    raise BadData(
                        f"{path} has no data sets with names such as 'x_train' and 'y_train': name the "
                        "inputs and the targets by --data.features NAME --data.labels NAME; it has "
                        + _all(names)
                    )
                return replace(from_keys(found, path.stem, str(path), labelled), groups=groups)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
            raise damaged(path, error) from error

    @staticmethod
    @override
    def write(contents: Contents[Stored[Rows], Array], path: Path) -> None:
        """Write a file with a data set for each array, in one stretch each."""
        h5py = optional_package("h5py", "HDF5 files")
        with h5py.File(path, "w") as file:
            for key, rows in to_keys(contents).items():
                if rows.dtype.kind == "U":
                    file.create_dataset(key, data=rows[:].tolist(), dtype=h5py.string_dtype())
                elif rows.ndim == 0:
                    file[key] = rows
                else:
                    stored = file.create_dataset(key, rows.shape, rows.dtype)
                    for start, chunk in chunks_of(rows):
                        stored[start : start + len(chunk)] = chunk


_Names: TypeAlias = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""The shapes and types of the data sets of a file, by name."""


def _names(file: Any) -> _Names:
    """The data sets of a file with their shapes and types, those of nested groups, too."""
    import h5py

    found = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            found[name] = tuple(item.shape), item.dtype

    file.visititems(note)
    return found


def _refuse_alike(path: Path, words: dict[str, str]) -> None:
    """Refuse data sets of several groups that are called alike: nobody knows which of them are meant."""
    first: dict[str, str] = {}
    for name, word in words.items():
        known = slot_of(word) is not None or word in EXTRA_KEYS
        if known and first.setdefault(word, name) != name:
            raise BadData(
                f"{path} has '{first[word]}' and '{name}', which stand for the same; say which is meant by "
                "--data.features NAME --data.labels NAME, or call those of the parts x_train, x_test, ..."
            )


def _all(names: _Names) -> str:
    return listed([f"{name} {shape}" for name, (shape, _) in names.items()]) or "no data sets"


def _features(path: Path, names: _Names, wanted: str | list[str]) -> object:
    """Return the inputs: one, or several by the ends of their names, unless they are columns of a table."""
    listed = [_named(path, names, one) for one in ([wanted] if isinstance(wanted, str) else wanted)]
    table = all(len(names[one][0]) == 1 and names[one][1].kind in "biuf" for one in listed)
    if len(listed) == 1 or table:
        return _one_input(path, names, listed)
    words = [one.rpartition("/")[2] for one in listed]
    if len(set(words)) < len(words):
        raise BadData(
            f"{path} has inputs that are called alike: {', '.join(listed)}; a model takes them by name"
        )
    return {word: _one_input(path, names, [one]) for word, one in zip(words, listed, strict=True)}


def _one_input(path: Path, names: _Names, wanted: list[str]) -> object:
    """Return an input; sequences as an array of arrays."""
    import h5py

    base = h5py.check_vlen_dtype(names[wanted[0]][1])
    if len(wanted) > 1 or not isinstance(base, np.dtype) or base.kind not in "biuf":
        return _inputs(path, names, wanted)
    with h5py.File(path, "r") as file:
        sequences: Array = file[wanted[0]][...]
        return sequences


def _inputs(path: Path, names: _Names, wanted: str | list[str]) -> StoredRows:
    several = [_named(path, names, one) for one in ([wanted] if isinstance(wanted, str) else wanted)]
    shapes = [names[one][0] for one in several]
    for one, shape in zip(several, shapes, strict=True):
        dtype = names[one][1]
        if dtype.kind not in "biuf":
            raise BadData(f"{path} has no numbers in '{one}', which is of type {dtype}; choose others")
        if not shape:
            raise BadData(f"{path} has a single value in '{one}'; give one input for each sample")
        if len(several) > 1 and (len(shape) != 1 or shape != shapes[0]):
            raise BadData(
                f"{path} has the shape {shape} in '{one}' and {shapes[0]} in '{several[0]}'; several "
                "features must have one number for each sample, and equally many"
            )
    types = [names[one][1] for one in several]
    refuse_larger_than_memory(
        path,
        sum(int(np.prod(shape, dtype=object)) * t.itemsize for shape, t in zip(shapes, types, strict=True)),
    )
    shape = shapes[0] if len(several) == 1 else (shapes[0][0], len(several))
    dtype = np.result_type(*types)
    most = max(1, CHUNK * shape[0] // max(1, int(np.prod(shape))))
    return StoredRows(shape, dtype, _reader(path, several, dtype), most)


def _reader(path: Path, several: list[str], dtype: np.dtype[Any]) -> Callable[[int, int], Array]:
    def read(start: int, stop: int) -> Array:
        import h5py

        try:
            with h5py.File(path, "r") as file:
                columns = [file[one][start:stop] for one in several]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise damaged(path, error) from error
        found: Array = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        # A file may have its numbers in the order of bytes of another machine.
        return found.astype(dtype, copy=False)

    return read


def _targets(path: Path, names: _Names, wanted: str | list[str] | None) -> Array:
    if isinstance(wanted, list):
        rows = _inputs(path, names, wanted)
        return rows[: len(rows)]
    import h5py

    one = _named(path, names, str(wanted))
    shape, dtype = names[one]
    refuse_larger_than_memory(path, int(np.prod(shape, dtype=object)) * dtype.itemsize)
    with h5py.File(path, "r") as file:
        stored = file[one]
        if h5py.check_string_dtype(stored.dtype) is not None:
            return np.asarray(stored.asstr()[...], dtype=str)
        values: Array = stored[...]
        return values


def _named(path: Path, names: _Names, wanted: str) -> str:
    name = str(wanted).strip("/")
    if name not in names:
        raise BadData(f"{path} has no data set '{wanted}'; it has {_all(names)}")
    return name
