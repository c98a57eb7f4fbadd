"""A user's `data`, read into arrays: a built-in name, a path, a factory, or an object.

"digits", "mnist", "fashion-mnist"            built in
"set.npz", "table.csv", "folder/", ...        files of a known format, with its reader's options
"s3://bucket/folder", "https://...", ...       the same, copied to this host once
"package.module:factory", "file.py:factory"   called with the options; gives one of the objects below
["a.h5", "b.h5"]                               files, whose samples are one data set
(x, y) or ((x, y), (x_test, y_test))          arrays, tensors, nested lists
dataset or (dataset, test_dataset)            map-style torch data sets, or lists of dicts, a sample each
{"x_train": ..., "y_train": ..., ...}         the keys of an NPZ file
a frame of pandas or polars                   with the options `target` and `columns`, as tables in files
(frame, targets), (frame, test frame)         likewise; two pairs, or {"train": frame, "test": frame}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from tutti.data.arrays import MISSING, as_weights, part_columns, stored_dtype, values_of
from tutti.data.builtin import BUILT_IN
from tutti.data.columns import Column, Columns, Stored
from tutti.data.contents import Contents, ReadData, contents_of
from tutti.data.formats import one_by_one, options_of, read_files, read_path
from tutti.data.formats.arrow_tables import frames_of, read_frame
from tutti.data.formats.npy import Mapped
from tutti.data.formats.several import of_parts
from tutti.data.remote import local_copy
from tutti.data.rows import Array, Rows, rows_of_kept
from tutti.data.schemas import check_there, not_streamed
from tutti.data.streaming import MOST, stream_options
from tutti.data.structure import Structure, taken_apart
from tutti.data.tables import LIKE, OF_ALL, TABLE_OPTIONS, check_options
from tutti.data.targets import CLASSES, KnownClasses, with_checked_targets
from tutti.errors import BadData, BadOption, NotFinite, UnknownName
from tutti.free_memory import free_bytes
from tutti.load_object import call_with_options, load_object, names_object, takes_option
from tutti.records.preparation import Table
from tutti.records.texts import printable


def read_source(data: object, options: Mapping[str, object], known: KnownClasses | str = CLASSES) -> ReadData:
    """Read and check a data set.

    Args:
        data: see the module's docstring.
        options: the arguments of a factory, or of the reader of a file. With every kind of data go `classes`
            (their number; "none": regression) and `missing`, the treatment of NaN among the
            inputs: "error", "drop" (leave the sample out), "mean" (use the mean of that input over the
            training samples) or "auto" (the median in tables that are prepared, else an error).
        known: the classes of a model that the data are for; or the meaning of whole numbers: see `meant_by`.

    Raises:
        BadData: the data are missing, broken, or do not fit together.
        NotFinite: NaN or inf in them.
        BadOption: an option that cannot be used.
        UnknownName: no such built-in data set, file, factory or option.
    """
    contents, given, missing = _contents(data, dict(options))
    try:
        return _with_targets(_checked(contents, missing), given, known)
    except (BadData, NotFinite) as error:
        if not isinstance(data, str | Path) or data in BUILT_IN or str(data) in str(error):
            raise
        raise type(error)(f"{data}: {error}") from error


def read_inputs(data: object, options: Mapping[str, object], part: str | None = None) -> ReadData:
    """Read and check the inputs of a part; all targets become 0.

    The part is "train", "validation" or "test"; None: the test part, or the only one.
    """
    contents, _, missing = _contents(data, dict(options), labelled=False)
    if missing == "drop":
        raise BadOption("--data.missing drop leaves samples out, but each is to be predicted; give 'mean'")
    only = next(iter(contents.parts)) if len(contents.parts) == 1 else None
    wanted = part or only or "test"
    # The only part of a file is called the training part.
    if wanted not in contents.parts:
        raise BadData(
            f"{contents.name} has no {wanted} part; it has: {', '.join(contents.parts)}. "
            + ("Leave --part out" if only else "Choose one with --part")
        )
    name = contents.name if only else f"{wanted} part of {contents.name}"
    inputs, _ = contents.parts[wanted]
    given = replace(contents, name=name, parts={"train": (inputs, None)}, weights={})
    return _checked(given, missing, "given")


def _checked(contents: Contents[object], missing: str, name: str | None = None) -> ReadData:
    """Bring inputs into their stored form."""
    if missing == "auto":
        missing = "error" if contents.table is None else "prepare"
    structure = taken_apart({part: x for part, (x, _) in contents.parts.items()})
    streamed = contents.buffer_bytes > 0
    read, weights, left_out = {}, dict[str, Array](), dict(contents.left_out)
    for part, (_, y) in contents.parts.items():
        word = name or part
        inputs = [(structure.label(word, at), one) for at, one in enumerate(structure.parts[part])]
        read[part] = part_columns(word, inputs, y, missing, contents.columns, finite=not streamed)
        kept, samples = read[part][2], 0 if y is None else len(cast("Sized", y))
        if part in contents.weights:
            weights[part] = as_weights(contents.weights[part], samples, f"the {part} weights")[kept]
        if len(kept) < samples:
            absent = left_out.get(part, np.arange(0))
            left_out[part] = np.delete(np.arange(samples + len(absent)), rows_of_kept(kept, absent))
    columns = {part: x for part, (x, *_) in read.items()}
    _refuse_other_kinds(structure, columns)
    inputs_of = _in_one_form(structure, columns)
    train, _, kept = read["train"]
    groups = contents.groups
    if groups is not None:
        before = len(cast("Sized", contents.parts["train"][1]))
        if len(groups) != before:
            raise BadData(f"there are {len(groups):,} groups, but {before:,} samples; give one for each")
        groups = groups[kept]
    return replace(
        cast(ReadData, contents),
        name=printable(contents.name),
        parts={part: (inputs_of[part], y) for part, (_, y, _) in read.items()},
        columns=tuple(map(printable, contents.columns)),
        filled=missing == "mean" and any(stored_dtype(one.rows).kind == "f" for one in train),
        groups=groups,
        left_out=left_out,
        weights=weights,
    )


def _with_targets(contents: ReadData, given: int | None, known: KnownClasses | str) -> ReadData:
    found = with_checked_targets(contents, given, known)
    labels = tuple(printable(one) if isinstance(one, str) else one for one in found.labels)
    return replace(found, labels=labels)


def _refuse_other_kinds(given: Structure, read: Mapping[str, tuple[Column[Rows], ...]]) -> None:
    """Refuse inputs whose shapes or dtypes differ from the training part's."""
    for part, columns in read.items():
        for number, (column, train) in enumerate(zip(columns, read["train"], strict=True)):
            here, there = values_of(column), values_of(train)
            if here.shape[1:] != there.shape[1:] or stored_dtype(here) != stored_dtype(there):
                raise BadData(
                    f"the {given.label(part, number)} have the shape {here.shape} and type {here.dtype}, the "
                    f"{given.label('train', number)} {there.shape} and {there.dtype}; all parts need one "
                    "input shape and one type"
                )


def _in_one_form(given: Structure, read: Mapping[str, tuple[Column[Rows], ...]]) -> dict[str, Stored[Rows]]:
    """Return the inputs of each part: one array, or columns with the longest length over all parts."""
    if given.single:
        return {part: columns[0].rows for part, columns in read.items()}
    longest = [max(column.longest for column in columns) for columns in zip(*read.values(), strict=True)]
    return {
        part: Columns(
            tuple(replace(column, longest=most) for column, most in zip(columns, longest, strict=True)),
            given.names,
        )
        for part, columns in read.items()
    }


def like_training(
    data: object,
    options: Mapping[str, object],
    columns: Sequence[str],
    table: Table | None,
    target: object = None,
) -> dict[str, object]:
    """Return the options for reading other data like a model's training data.

    Args:
        data: as for `read_source`; for built-in data and factories the options are unchanged.
        options: of the user. Columns that they choose are kept, unless there is a `table`.
        columns: the names of the training's columns; numbers are no names.
        table: the table that the model takes; None: it takes numbers unprepared.
        target: the option of the training, if the user names another file and no target.
    """
    adapted = dict(options)
    made = isinstance(data, str) and (data in BUILT_IN or names_object(data))
    if made or not isinstance(data, str | Path):
        return adapted
    known = options_of(Path(str(local_copy(data))).expanduser())
    if target is not None and "target" in known:
        adapted.setdefault("target", target)
    if table is not None and "prepare" in known:
        adapted.pop("columns", None)
        return {**adapted, LIKE: table.columns}
    if "prepare" in known:
        adapted["prepare"] = "off"
    if columns and "columns" in known and not all(name.isdecimal() for name in columns):
        adapted.setdefault("columns", list(columns))
    return adapted


def _contents(
    data: object, options: dict[str, object], labelled: bool = True
) -> tuple[Contents[object], int | None, str]:
    """Return the contents of `data`, and the options for classes and missing values."""
    factory = load_object(data, "data set") if isinstance(data, str) and names_object(data) else None
    classes = None if takes_option(factory, "classes") else _classes(options.pop("classes", None))
    missing = "error" if takes_option(factory, "missing") else _missing(options.pop("missing", "auto"))
    if factory is not None:
        spec = str(data)
        made = call_with_options(factory, options, "data set", spec, known=OF_ALL)
        what = f"what '{spec}' returned"
        return contents_of(made, spec.rpartition(":")[2], what, labelled), classes, missing
    if isinstance(data, str):
        check_there(data)
    data = local_copy(data)
    if isinstance(data, str | Path) and data not in BUILT_IN:
        wanted, buffer_bytes, options = stream_options(options)
        path = Path(data).expanduser()
        read = read_path(path, {**options, "missing": missing}, labelled)
        streamed = _is_streamed(read, wanted, missing, path)
        return replace(read, buffer_bytes=buffer_bytes if streamed else 0), classes, missing
    if isinstance(data, list | tuple) and data and all(isinstance(one, str | Path) for one in data):
        files = [Path(str(local_copy(str(one)))).expanduser() for one in data]
        return read_files(files, {**options, "missing": missing}, labelled), classes, missing
    if frames := frames_of(data, options):
        check_options(options, TABLE_OPTIONS, "the frame")
        each = one_by_one(frames.values(), read_frame, {**options, "missing": missing}, labelled)
        return of_parts(each[0].name, dict(zip(frames, each, strict=True)), "the data"), classes, missing
    if options:
        hint = "Only factories and files take others."
        raise UnknownName("option", next(iter(options)), OF_ALL, hint, of="the data")
    if isinstance(data, str):
        return BUILT_IN[data](), classes, missing
    name = "arrays" if isinstance(data, tuple | list | dict) else type(data).__name__
    return contents_of(data, name, "the data", labelled), classes, missing


def _is_streamed(contents: Contents[object], wanted: bool | None, missing: str, path: Path) -> bool:
    """Return whether the inputs stay in their files; refuse a wish that is impossible."""
    inputs = [x for x, _ in contents.parts.values()]
    if wanted is False:
        return False
    if missing not in ("auto", "error") or not all(isinstance(one, Mapped) for one in inputs):
        if wanted:
            raise not_streamed(path)
        return False
    free = free_bytes()
    needed = sum(one.size * stored_dtype(one).itemsize for one in inputs if isinstance(one, Mapped))
    return bool(wanted) or (free is not None and needed > MOST * free)


def _missing(value: object) -> str:
    if value not in MISSING:
        raise BadOption(f"--data.missing is {value!r}; give one of {', '.join(MISSING)}")
    return str(value)


def _classes(value: object) -> int | None:
    if value is None or value == "none":
        return None if value is None else 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadOption(
            f"--data.classes is {value!r}; give a whole number of at least 1, or none for regression"
        )
    return value
