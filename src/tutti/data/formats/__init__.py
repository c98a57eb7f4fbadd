"""The data file formats, a file for each, and what their readers share. Errors name the file and the bytes.

A format is recognised by the first bytes of a file, not by its name; texts and archives by the end of their
names, and a folder by its contents.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import numpy as np

from tutti import parts
from tutti.data.arrays import as_array
from tutti.data.columns import Column
from tutti.data.contents import Contents
from tutti.data.rows import Indices, Rows, StoredRows, joined
from tutti.data.schemas import nearest
from tutti.data.structure import sequence_column
from tutti.data.tables import LIKE, check_options, listed
from tutti.errors import BadData
from tutti.records.npz import open_data_file
from tutti.registry import Registry

T = TypeVar("T")


class Format:
    """A data file format.

    Attributes:
        name: for users.
        start: the first bytes of its files; empty if these may be any.
        endings: the ends of its files' names, if `start` is empty.
        options: the names of its options for users, `--data.NAME VALUE`.
    """

    name: ClassVar[str]
    start: ClassVar[bytes] = b""
    endings: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Return whether a folder holds a data set of this format."""
        return False

    @staticmethod
    def files(path: Path) -> list[Path]:
        """Return the files of the training part, if a path means several; else none.

        Raises:
            BadData: a file is missing. This is seen before any rank is started.
        """
        return []

    @classmethod
    def read(cls, path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        """Read the data set in a file or in a folder; by default the one in its `files`.

        Args:
            path: of the file or the folder.
            options: the user's values for `options`, and "missing": "error", "drop" or "mean".
            labelled: whether targets are needed; if not, they may be missing, and must not be read.

        Returns:
            `Contents(name, {"train": (inputs, targets)})`, with a part "test" if the file has one.

        Raises:
            BadData: it is broken, or files that belong to it are missing.
        """
        return replace(read_files(cls.files(path), options, labelled), name=path.stem)


FORMATS: Final[Registry[type[Format]]] = parts.FORMATS
"""The formats by name."""


def options_of(path: Path) -> tuple[str, ...]:
    """Return the names of the options of a path's format, or of the format of its files."""
    form = format_of(path)
    files = form.files(path)
    return options_of(files[0]) if files else form.options


def read_path(path: Path, options: Mapping[str, object], labelled: bool = True) -> Contents[object]:
    """Read a file or a folder of any format; `options` are its format's, and "missing"."""
    form, known = format_of(path), options_of(path)
    check_options(options, known, f"the {form.name} data '{path}'")
    contents = form.read(path, options, labelled)
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()  # It keeps what is free now.
    return contents


def read_files(
    paths: Sequence[Path], options: Mapping[str, object], labelled: bool = True
) -> Contents[object]:
    """Read several files, whose samples are one data set, in the order of the files."""
    first, *others = every = one_by_one(paths, read_path, options, labelled)
    if not others:
        return first
    refuse_other_traits(dict(zip(map(str, paths), every, strict=True)))
    parts, left_out = dict[str, tuple[object, object]](), dict[str, Indices]()
    for part in first.parts:
        inputs, targets = zip(*(one.parts[part] for one in every), strict=True)
        parts[part] = (
            _together(inputs),
            np.concatenate([_rows(one)[:] for one in targets]) if labelled else None,
        )
        if any(one.left_out for one in every):
            absent = [one.left_out.get(part, np.arange(0)) for one in every]
            counts = (len(_rows(one)) + len(rows) for one, rows in zip(targets, absent, strict=True))
            each = zip(accumulate(counts, initial=0), absent, strict=False)
            left_out[part] = np.concatenate([start + rows for start, rows in each])
    groups = [one.groups for one in every if one.groups is not None]
    weights = {part: np.concatenate([_rows(one.weights[part])[:] for one in every]) for part in first.weights}
    together = np.concatenate(groups) if groups else None
    return replace(first, parts=parts, groups=together, weights=weights, left_out=left_out)


def one_by_one(
    sources: Iterable[T],
    read: Callable[[T, Mapping[str, object], bool], Contents[object]],
    options: Mapping[str, object],
    labelled: bool,
) -> list[Contents[object]]:
    """Read several sources of one data set; their tables are one, with continued kinds and texts."""
    found: list[Contents[object]] = []
    for source in sources:
        found.append(one := read(source, options, labelled))
        if one.table is not None:
            options = {**options, LIKE: one.table.columns}
    first, last = found[0].table, found[-1].table
    table = None if first is None or last is None else replace(first, columns=last.columns)
    return [replace(one, table=table) for one in found]


def refuse_other_traits(found: Mapping[str, Contents[object]]) -> None:
    """Refuse files or parts of a data set, by their names, that differ from the first."""
    (first, wanted), *others = [(name, _traits(one)) for name, one in found.items()]
    for name, here in others:
        for trait in wanted | here:
            if here.get(trait) != wanted.get(trait):
                raise BadData(
                    f"{name} has other {trait} than {first}, {here.get(trait) or 'none'} and not "
                    f"{wanted.get(trait) or 'none'}; all need the same"
                )


def _traits(contents: Contents[object]) -> dict[str, str]:
    """Return the common traits of the files of a data set, in words."""
    found = {"columns": listed(contents.columns), "class names": listed([*map(str, contents.labels)])}
    for part, (inputs, targets) in contents.parts.items():
        for name, one in inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]:
            rows = _rows(one.values if isinstance(one, Column) else one)
            found[f"{part} inputs {name}".strip()] = f"shape {rows.shape[1:]}, type {rows.dtype}"
        if targets is not None:
            goals = _rows(targets)
            kind = "texts" if goals.dtype.kind in "US" else "numbers"
            found[f"{part} targets"] = f"shape {goals.shape[1:]}, {kind}"
        if part in contents.weights:
            found[f"{part} weights"] = "some"
    return found


def _together(inputs: Sequence[Any]) -> object:
    """Return the inputs of several files as one, or each of several."""
    if isinstance(inputs[0], Mapping):
        return {name: _together([one[name] for one in inputs]) for name in inputs[0]}
    if all(isinstance(one, Column) for one in inputs):
        lengths = np.concatenate([one.rows[:, 1] for one in inputs])
        return sequence_column(joined([one.values for one in inputs]), lengths)
    return joined([_rows(one) for one in inputs])


def _rows(value: object) -> Rows:
    return value if isinstance(value, StoredRows) else np.atleast_1d(as_array(value, "data"))


def in_order(files: Iterable[Path]) -> list[Path]:
    """Return the files of an array or of a part in the order of the numbers in their names."""
    ordered = sorted(files, key=lambda file: [one.zfill(20) for one in re.split(r"(\d+)", file.name)])
    matches = [re.search(r"-of-(\d+)", file.name) for file in ordered]
    counts = {match and int(match[1]) for match in matches}
    if ordered and counts not in ({None}, {len(ordered)}):
        names = listed([file.name for file in ordered])
        raise BadData(
            f"{ordered[0].parent} has {len(ordered):,} files {names}, whose names say more; copy them again"
        )
    return ordered


def format_of(path: Path) -> type[Format]:
    """Return the format of a file or of a folder."""
    forms = list(FORMATS.values())
    if not path.exists():
        if any(letter in str(path) for letter in "*?["):
            return FORMATS["pattern"]
        raise BadData(f"there is no {path}; {nearest(path)}")
    if path.is_dir():
        found = next((form for form in forms if form.in_folder(path)), None)
        if found is None:
            names = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir())
            raise BadData(
                f"{path} holds no data set that is known: it has {listed(names) or 'nothing'}; expected NPY "
                "files (x_train.npy, y_train.npy, ...), IDX files (train-images-idx3-ubyte, ...), a file for "
                "each part (train.csv, test.csv), or a folder of pictures for each class"
            )
        return found
    with open_data_file(path) as file:
        start = file.read(max(len(form.start) for form in forms))
    if not start:
        raise BadData(f"{path} is empty (0 bytes); copy or download it again")
    name = path.name.lower()
    for form in forms:
        if (form.start and start.startswith(form.start)) or (form.endings and name.endswith(form.endings)):
            return form
    known = ", ".join(
        f"{form.name} ({', '.join(form.endings)})" if form.endings else form.name for form in forms
    )
    raise BadData(
        f"{path} is of no known kind: it begins with the bytes {start[:4].hex(' ')}; give one of: {known}; "
        "or write a function that reads it and returns (inputs, targets), and give --data mine.py:read"
    )
