"""The data file formats, a file for each, and what their readers share. Errors name the file and the bytes.

A format is known by the first bytes of a file, not by its name; only one whose files may begin with anything,
as texts do, is known by their names. A folder is known by what it holds.
"""

from __future__ import annotations

import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np

from tutti.data.arrays import as_array
from tutti.data.columns import Stored
from tutti.data.contents import Contents
from tutti.data.rows import Array, Rows, StoredRows, joined
from tutti.errors import BadData, BadOption
from tutti.load_object import call_with_options, takes_option
from tutti.records.npz import open_data_file
from tutti.registry import Registry


class Format(ABC):
    """A data file format.

    Attributes:
        name: for users.
        start: the first bytes of its files; none, if these may be any.
        endings: those of the names of its files, if these may begin with any bytes.
        written: the ending of what `write` makes; "/": a folder; "": it makes nothing.
    """

    name: ClassVar[str]
    start: ClassVar[bytes] = b""
    endings: ClassVar[tuple[str, ...]] = ()
    written: ClassVar[str] = ""

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Tell whether a folder holds a data set of this format."""
        return False

    @staticmethod
    def check(path: Path) -> None:
        """Refuse what can be seen to be wrong without reading the data, before any rank is started.

        Raises:
            BadData: a file that the data consist of is missing.
        """
        return

    @staticmethod
    @abstractmethod
    def read(path: Path) -> Contents[object]:
        """Read the data set in a file that begins with `start`, through `open_data_file`, or in a folder.

        Further parameters are options for users, `--data.NAME VALUE`; `missing` is "error", "drop" or "mean".
        One called `labelled` is none: it is False where targets may be missing, and are not to be read.

        Returns:
            `Contents(name, {"train": (inputs, targets)})`, with a part "test" where the file has one.

        Raises:
            BadData: it is broken, or files that belong to it are missing.
        """

    @staticmethod
    def files(path: Path) -> list[Path]:
        """Return the files of the training part, where this is a list or a folder of them; else none."""
        return []

    @staticmethod
    def write(contents: Contents[Stored[Rows], Array], path: Path) -> None:
        """Write a data set, so that `read` gives the same; no more than a chunk of it is in memory.

        Raises:
            BadData: the format cannot hold it.
            OSError: there is no room.
        """
        raise NotImplementedError


OF_ALL: Final = ("classes", "missing")
"""The options that go with every kind of data."""

FORMATS: Final[Registry[type[Format]]] = Registry("tutti.data.formats", "data file format")
"""The formats by name."""


def read_path(path: Path, options: Mapping[str, object], labelled: bool = True) -> Contents[object]:
    """Read a file or a folder.

    Args:
        path: of any format.
        options: of its reader; "missing" counts only if that takes it.
        labelled: whether it needs targets; formats without inputs alone are read with them in any case.

    Raises:
        BadData: it is missing, broken or of an unknown kind.
        UnknownName: an option that its reader does not have.
    """
    form = format_of(path)
    if "group" in options and not form.files(path) and not takes_option(form.read, "group"):
        raise BadOption(
            f"{path} has no columns by name, such as '{options['group']}' (--group-by); give FILE.npy with a "
            "value for each sample"
        )
    if not takes_option(form.read, "missing"):
        options = {key: value for key, value in options.items() if key != "missing"}
    own: dict[str, object] = {"path": path}
    if takes_option(form.read, "labelled"):
        own["labelled"] = labelled
    made = call_with_options(form.read, options, f"{form.name} data", str(path), own, OF_ALL)
    assert isinstance(made, Contents), f"{form.name} has read no data set"
    return made


def takes_data_option(path: Path, name: str) -> bool:
    """Tell whether the reader of a file, or of the files in a list or a folder, takes an option."""
    form = format_of(path)
    files = form.files(path)
    return takes_data_option(files[0], name) if files else takes_option(form.read, name)


def _joined_groups(paths: Sequence[Path], groups: Sequence[Array | None]) -> Array | None:
    """Return the groups of the samples of several files.

    Raises:
        BadData: one has numbers and another texts.
    """
    found = [one for one in groups if one is not None]
    if not found:
        return None
    for path, one in zip(paths, found, strict=True):
        if (one.dtype.kind in "US") != (found[0].dtype.kind in "US"):
            raise BadData(f"{path} has texts or numbers as groups, and {paths[0]} the other; give one kind")
    return np.concatenate(found)


def read_files(
    paths: Sequence[Path], options: Mapping[str, object], labelled: bool = True
) -> Contents[object]:
    """Read several files, whose samples are one data set, in the order of the files.

    Args:
        paths: of files of any format.
        options: of their readers.
        labelled: as for `read_path`.

    Raises:
        BadData: one is missing or broken, or has samples of another shape or type than the first.
        UnknownName: an option that a reader does not have.
    """
    all_read = [read_path(path, options, labelled) for path in paths]
    first, *others = all_read
    if not others:
        return first
    for path, contents in zip(paths[1:], others, strict=True):
        for what, one, other in (
            ("parts", list(first.parts), list(contents.parts)),
            ("columns", list(first.columns), list(contents.columns)),
            ("class names", list(first.labels), list(contents.labels)),
        ):
            if one != other:
                raise BadData(
                    f"{path} has the {what} {listed(other) or 'none'}, but {paths[0]} has "
                    f"{listed(one) or 'none'}; all files of a data set need the same"
                )
    parts: dict[str, tuple[object, object | None]] = {}
    for part in first.parts:
        pairs = [one.parts[part] for one in all_read]
        inputs = _together(paths, [x for x, _ in pairs])
        if not labelled:
            parts[part] = inputs, None
            continue
        targets = [_rows(path, "targets", y)[:] for path, (_, y) in zip(paths, pairs, strict=True)]
        for path, (x, _), y in zip(paths, pairs, targets, strict=True):
            each: list[Any] = [*x.values()] if isinstance(x, Mapping) else [x]
            wrong = next((one for one in each if isinstance(one, Sized) and len(one) != len(y)), None)
            if wrong is not None:
                raise BadData(f"{path} has {len(wrong):,} inputs but {len(y):,} targets; give one for each")
            if not (first.columns and {y.dtype.kind, targets[0].dtype.kind} <= {"i", "f"}):
                _refuse_other(path, "targets", y, paths[0], targets[0])
        parts[part] = inputs, np.concatenate(targets)
    return replace(first, parts=parts, groups=_joined_groups(paths, [one.groups for one in all_read]))


def _input_names(inputs: object) -> list[str]:
    return list(map(str, inputs)) if isinstance(inputs, Mapping) else ["one"]


def _together(paths: Sequence[Path], inputs: Sequence[object]) -> object:
    """Return the inputs of several files as one, or each of several.

    Raises:
        BadData: a file has others, or of another shape or type, than the first.
    """
    first = inputs[0]
    for path, one in zip(paths, inputs, strict=True):
        names, here = _input_names(first), _input_names(one)
        if names != here:
            raise BadData(
                f"{path} has the inputs {listed(here)}, but {paths[0]} has {listed(names)}; all files of a "
                "data set need the same"
            )
    if isinstance(first, Mapping):
        return {name: _together(paths, [cast("Any", one)[name] for one in inputs]) for name in first}
    if all(isinstance(one, np.ndarray) and one.dtype == object for one in inputs):
        return np.concatenate([np.asarray(one) for one in inputs])  # sequences
    rows = [_rows(path, "inputs", x) for path, x in zip(paths, inputs, strict=True)]
    for path, x in zip(paths, rows, strict=True):
        _refuse_other(path, "inputs", x, paths[0], rows[0])
    return joined(rows)


def _rows(path: Path, kind: str, value: object) -> Rows:
    rows = value if isinstance(value, StoredRows) else as_array(value, f"{kind} of {path}")
    if rows.ndim == 0:
        raise BadData(f"the {kind} of {path} are a single value; give one for each sample")
    return rows


def _refuse_other(path: Path, kind: str, rows: Rows, model: Path, first: Rows) -> None:
    texts = rows.dtype.kind in "US" and first.dtype.kind in "US"
    if rows.shape[1:] != first.shape[1:] or (rows.dtype != first.dtype and not texts):
        raise BadData(
            f"the {kind} of {path} are of shape {rows.shape[1:]} and type {rows.dtype}, those of {model} of "
            f"{first.shape[1:]} and {first.dtype}; all files of a data set need one shape and one type"
        )


def format_of(path: Path) -> type[Format]:
    """Return the format of a file or of a folder.

    Raises:
        BadData: it is missing, empty or of another kind.
    """
    if not path.exists():
        if "{" in str(path):
            return FORMATS["pattern"]
        raise BadData(f"there is no {path}; {nearest(path)}")
    forms = list(FORMATS.values())
    if path.is_dir():
        found = next((form for form in forms if form.in_folder(path)), None)
        if found is None:
            names = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir())
            raise BadData(
                f"{path} holds no data set that is known: it has {listed(names) or 'nothing'}; expected "
                "IDX files (train-images-idx3-ubyte and train-labels-idx1-ubyte, also as .gz, and t10k-... "
                "for the test part), NPY files (x_train.npy and y_train.npy, ...), or a file for each part "
                "(train.csv, test.csv)"
            )
        return found
    start = read_start(path, max(4, *(len(form.start) for form in forms)))
    name = path.name.lower()
    for form in forms:
        if name.endswith(form.endings):
            return form
    # Of two formats of which one begins like the other, the one that says more.
    for form in sorted(forms, key=lambda form: len(form.start), reverse=True):
        if form.start and start.startswith(form.start):
            return form
    known = ", ".join(
        f"{form.name} ({form.start.hex(' ') + ' ...' if form.start else ', '.join(form.endings)})"
        for form in forms
        if form.start or form.endings
    )
    raise BadData(
        f"{path} is of no known kind: it begins with the bytes {start.hex(' ')}; give a file of one of these "
        f"formats: {known}; numpy.savez('data.npz', x=inputs, y=targets) makes an NPZ file of arrays. Or "
        f"write a function that reads it, and give --data mine.py:read:\n\n{_factory(path)}"
    )


def _factory(path: Path) -> str:
    """A file mine.py with a function that reads a file, to begin with."""
    return (
        "    import numpy as np\n\n"
        f"    def read(path={str(path)!r}):\n"
        '        table = np.loadtxt(path, delimiter=",")  # or whatever reads it\n'
        '        return table[:, :-1].astype("float32"), table[:, -1].astype("int64")\n'
    )


def read_start(path: Path, count: int = 4) -> bytes:
    """Read the first bytes of a file.

    Raises:
        BadData: the file cannot be opened, or it is empty.
    """
    with open_data_file(path) as file:
        start = file.read(count)
    if not start:
        raise BadData(f"{path} is empty (0 bytes); copy or download it again")
    return start


def nearest(path: Path) -> str:
    """Say which file a missing one may be, or which there are."""
    folder = path.parent
    while not os.path.isdir(folder):
        path, folder = folder, folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"{folder.resolve()} has: {listed(names) or 'nothing'}"


def listed(names: Sequence[str]) -> str:
    """List the first of some names."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
