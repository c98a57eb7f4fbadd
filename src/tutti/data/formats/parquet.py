"""Parquet and Arrow files: columns of numbers, of lists of numbers, or of pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.arrays import as_floats, chunks_of, float_dtype
from tutti.data.columns import Columns, Stored
from tutti.data.contents import Contents, refuse_other_names
from tutti.data.formats import Format
from tutti.data.items import TARGET_WORDS
from tutti.data.pictures import Pictures, decoded_some, stamp
from tutti.data.rows import Array, Indices, Rows, chosen
from tutti.data.tables import (
    Column,
    choose,
    groups_of,
    is_number,
    refuse_long_texts,
    targets_of,
)
from tutti.errors import BadData
from tutti.records.npz import damaged, open_data_file, refuse_larger_than_memory
from tutti.registry import part

_MOST_NAMED: Final = 12
"""The most columns that an error lists for the user to paste."""

_TARGET: Final = "target"
"""The name of the target in files that are written."""


def arrow_package() -> Any:
    """Return pyarrow, which is imported by data that need it alone."""
    import pyarrow

    return pyarrow


@part("Parquet")
class Parquet(Format):
    """Parquet files: `--data.target` names the column to be predicted; pictures are decoded."""

    start = b"PAR1"
    written = ".parquet"

    @staticmethod
    def read(
        path: Path,
        target: object = None,
        columns: object = None,
        missing: str = "error",
        size: object = None,
        skip_bad: bool = False,
        labelled: bool = True,
        group: object = None,
    ) -> Contents[object]:
        """Read a table.

        Args:
            path: of the file.
            target: the column to be predicted, or several.
            columns: those to predict it from: several of numbers, one of lists, or one of pictures; None: all
                others.
            missing: "drop" leaves out rows without a target.
            size: height and width that pictures are brought to; None: they have one size.
            skip_bad: leave out pictures that cannot be decoded.
            labelled: whether there must be a target.
            group: the column by which samples are grouped, which is no input.
        """
        with _opened(path) as table:
            return read_table(table, target, columns, missing, size, bool(skip_bad), labelled, group)

    @staticmethod
    @override
    def write(contents: Contents[Stored[Rows], Array], path: Path) -> None:
        """Write a table: a column for each input that has a name, else one of lists."""
        _write(contents, path)


@part("Arrow")
class Arrow(Parquet):
    """Arrow files, which are also called Feather; as Parquet ones."""

    start = b"ARROW1"
    written = ""


@dataclass(frozen=True)
class Table:
    """A table in a file.

    Attributes:
        path: of the file.
        schema: of its columns.
        column: reads a column by its name.
        pictures: the input, where it is one of pictures that are not in a column.
    """

    path: Path
    schema: Any
    column: Callable[[str], Any]
    pictures: Pictures | None = None

    @classmethod
    def of(cls, path: Path, table: Any, pictures: Pictures | None = None) -> Table:
        """Return a table of Arrow that is in memory."""
        return cls(path, table.schema, table.column, pictures)


@contextmanager
def _opened(path: Path) -> Iterator[Table]:
    """Open a file, and refuse one that turns out to be damaged."""
    arrow = arrow_package()
    with open_data_file(path) as file:
        packed = file.read(len(Parquet.start)) == Parquet.start
    try:
        yield _open_parquet(path) if packed else _open_arrow(path)
    except (arrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise damaged(path, error) from error


def is_frame(value: object) -> bool:
    """Tell whether a value is a table in memory: a frame of pandas or polars, or a table of Arrow."""
    return type(value).__name__ in ("DataFrame", "Table") and type(value).__module__.partition(".")[0] in (
        "pandas",
        "polars",
        "pyarrow",
    )


def read_frame(
    frame: Any,
    target: object = None,
    columns: object = None,
    missing: str = "error",
    labelled: bool = True,
    group: object = None,
) -> Contents[object]:
    """Read a table in memory, as one in a file.

    Args:
        frame: of pandas or polars, or a table of Arrow.
        target: as for `Parquet.read`.
        columns: likewise.
        missing: likewise.
        labelled: likewise.
        group: likewise.

    Raises:
        BadData: as for a file; or pandas holds what is no column of one kind.
    """
    arrow, name = arrow_package(), type(frame).__name__
    try:
        if type(frame).__module__.startswith("pandas"):
            table = arrow.Table.from_pandas(frame, preserve_index=False)
        else:
            table = frame if isinstance(frame, arrow.Table) else frame.to_arrow()
    except arrow.ArrowException as error:
        raise BadData(f"the {name} has a column that is not of one kind: {str(error)[:200]}") from error
    except (TypeError, ValueError) as error:  # columns called alike, or of a kind of pandas' own
        raise BadData(
            f"the {name} is no table that Arrow can hold: {str(error)[:200]}; give each column a name of its "
            "own, and plain numbers or texts"
        ) from error
    found = Table.of(Path(f"the {name}"), table)
    return replace(read_table(found, target, columns, missing, labelled=labelled, group=group), name=name)


def are_parts(value: object, chosen: bool) -> bool:
    """Tell whether a value is the training part and the test part of a data set, two tables in memory.

    They have the same columns, of which one is the target. Otherwise such a pair is inputs and targets.

    Args:
        value: anything.
        chosen: options of tables are given; without, a column's name must say that it is the target.
    """
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(map(is_frame, value))):
        return False
    first, second = ({*map(str, one.schema.names if _is_arrow(one) else one.columns)} for one in value)
    return first == second and (chosen or any(name.lower() in TARGET_WORDS for name in first))


def read_parts(
    frames: Any,
    target: object = None,
    columns: object = None,
    missing: str = "error",
    labelled: bool = True,
    group: object = None,
) -> Contents[object]:
    """Read the training part and the test part of a data set, two tables in memory.

    Args:
        frames: both; columns are found by their names.
        target: as for `read_frame`.
        columns: likewise.
        missing: likewise.
        labelled: likewise.
        group: likewise.

    Raises:
        BadData: as for one.
    """
    first, second = frames
    train = read_frame(first, target, columns, missing, labelled, group)
    named = list(train.columns) or columns
    test = read_frame(second, target, named, missing, labelled, None if named else group)
    refuse_other_names({"train": train.labels, "test": test.labels}, "the data")
    return replace(train, parts={**train.parts, "test": test.parts["train"]})


def _is_arrow(frame: object) -> bool:
    return type(frame).__module__.startswith("pyarrow")


def _open_parquet(path: Path) -> Table:
    from pyarrow import parquet

    file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    size = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
    refuse_larger_than_memory(path, size)
    return Table(path, file.schema_arrow, lambda name: file.read(columns=[name], use_threads=False).column(0))


def _open_arrow(path: Path) -> Table:
    arrow = arrow_package()
    return Table.of(path, arrow.ipc.open_file(arrow.memory_map(str(path))).read_all())


def read_table(
    table: Table,
    target: object,
    columns: object,
    missing: str,
    size: object = None,
    skip_bad: bool = False,
    labelled: bool = True,
    group: object = None,
) -> Contents[object]:
    """Read a table; the options are those of `Parquet.read`."""
    path, names = table.path, table.schema.names
    choice = choose(names, target, columns, str(path), labelled, group)
    inputs, goals = ([names[at] for at in some] for some in (choice.inputs, choice.targets))
    targets: Array | None = None
    groups: Array | None = None
    wanted: Indices | None = None
    if labelled:
        targets, kept = targets_of([_target(table, name) for name in goals], missing, str(path))
        if choice.group is not None:
            groups = groups_of(_target(table, names[choice.group]), kept, str(path))
        wanted = np.flatnonzero(kept)
        if not len(wanted):
            raise BadData(f"{path} has no rows" + (" with a target" if len(kept) else ""))
    kinds = [table.schema.field(name).type for name in inputs]
    classes, labels = _classes(table.schema, goals)
    if len(inputs) == 1 and _holds_pictures(kinds[0]):
        pictures = table.pictures or _pictures(table, inputs[0])
        decoded, among = decoded_some(pictures, wanted, size, skip_bad)
        goal = None if targets is None else targets[among]
        groups = None if groups is None else groups[among]
        return Contents(path.stem, {"train": (decoded, goal)}, classes, labels, groups=groups)
    if any(map(_is_list, kinds)):
        named = {name: _kept(_values(table, name, inputs), wanted) for name in inputs}
        found = named if len(named) > 1 else named[inputs[0]]
        return Contents(path.stem, {"train": (found, targets)}, classes, labels, groups=groups)
    matrix = _kept(_matrix(table, inputs), wanted)
    parts: dict[str, tuple[object, object]] = {"train": (matrix, targets)}
    return Contents(path.stem, parts, classes, labels, columns=tuple(inputs), groups=groups)


def _kept(rows: Array, wanted: Indices | None) -> Rows:
    """Return some rows; None: all of them."""
    if wanted is None:
        return rows
    return rows[wanted] if rows.dtype == object else chosen(rows, wanted)


def _target(table: Table, name: str) -> Column:
    arrow = arrow_package()
    values = table.column(name)
    if not len(values):
        raise BadData(f"{table.path} has no rows")
    if arrow.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind, absent = values.type, np.asarray(values.is_null().to_numpy(), dtype=bool)
    values = values.drop_null()
    found: Array
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        texts = values.to_pylist()
        refuse_long_texts(texts, name, str(table.path))
        found = np.array(texts, dtype=str)
    elif _is_list(kind):
        found = _lists(table, name, values)
        if found.dtype == object:
            raise BadData(
                f"{table.path} has lists of several lengths in the target '{name}'; give all one length"
            )
    elif _is_number(kind):
        found = np.asarray(values.to_numpy())
    else:
        raise BadData(
            f"{table.path} has values of type {kind} in the target '{name}'; give numbers, texts or lists of "
            "numbers, in each row"
        )
    if absent.any():
        placed = np.zeros((len(absent), *found.shape[1:]), found.dtype if len(found) else float)
        placed[~absent] = found
        found = placed
    return Column(
        name, found, absent | (np.isnan(found) if found.dtype.kind == "f" and found.ndim == 1 else False)
    )


def _matrix(table: Table, names: Sequence[str]) -> Array:
    """Return columns of numbers side by side, as floats; NaN: missing."""
    for name in names:
        _refuse_other_kinds(table, name, names)
    columns = (_floats(table.column(name)) for name in names)
    first = next(columns)
    if not len(first):
        raise BadData(f"{table.path} has no rows")
    refuse_larger_than_memory(table.path, len(names) * first.nbytes)
    found = np.empty((len(first), len(names)), float_dtype())
    found[:, 0] = first
    for at, column in enumerate(columns, 1):
        found[:, at] = column
    return found


def _values(table: Table, name: str, inputs: Sequence[str]) -> Array:
    """Return an input that stays by itself: lists, or one number for each sample."""
    values = table.column(name)
    if not len(values):
        raise BadData(f"{table.path} has no rows")
    if _is_list(values.type):
        return _lists(table, name, values)
    _refuse_other_kinds(table, name, inputs)
    if values.null_count or arrow_package().types.is_floating(values.type):
        return _floats(values)
    return np.asarray(values.to_numpy()).astype(np.int64)


def _floats(values: Any) -> Array:
    numbers = values.cast(arrow_package().float64(), safe=False)
    return as_floats(np.asarray(numbers.to_numpy()))


def _refuse_other_kinds(table: Table, name: str, inputs: Sequence[str]) -> None:
    """Refuse a column of something else than numbers; the error has the first such value."""
    kind = table.schema.field(name).type
    if _is_number(kind):
        return
    rows = (
        f"row {row:,}, column '{name}' has '{str(value)[:80]}'"
        for row, value in enumerate(table.column(name), 1)
        if value.is_valid and not is_number(str(value))
    )
    kinds = {one: table.schema.field(one).type for one in inputs}
    numbers = [one for one, kind in kinds.items() if _is_number(kind) or _is_list(kind)]
    few = ",".join(numbers) if 0 < len(numbers) <= _MOST_NAMED else "A,B,..."
    raise BadData(
        f"{table.path} has values of type {kind} where a number is due: "
        f"{next(rows, repr(name))}; mend it, or choose the columns of numbers by --data.columns {few}"
    )


def _lists(table: Table, name: str, values: Any) -> Array:
    """Return a column of lists: an array, or an array of arrays where lists have several lengths."""
    blocks = [_flat(table, name, block) for block in values.chunks]
    lengths = np.concatenate([lengths for lengths, _ in blocks])
    full = [numbers for _, numbers in blocks if len(numbers)] or [blocks[0][1]]
    if len({numbers.shape[1:] for numbers in full}) > 1:
        raise _unequal(table, name)
    numbers = full[0] if len(full) == 1 else np.concatenate(full)
    if (lengths == lengths[0]).all():
        return numbers.reshape(len(lengths), lengths[0], *numbers.shape[1:])
    found: Array = np.empty(len(lengths), object)
    for at, end in enumerate(lengths.cumsum()):
        found[at] = numbers[end - lengths[at] : end]
    return found


def _flat(table: Table, name: str, values: Any) -> tuple[Array, Array]:
    """Return the lengths of lists, and what is in them, one after the other."""
    arrow = arrow_package()
    shape: list[int] = []
    while _is_list(values.type):
        if values.null_count:
            raise BadData(f"{table.path} has no list in some rows of the column '{name}'; leave these out")
        counts = np.asarray(arrow.compute.list_value_length(values).to_numpy(zero_copy_only=False))
        values = values.flatten()
        if not shape:
            lengths = counts.astype(np.int64)
            shape = [len(values)]
        elif len(set(counts.tolist())) > 1:
            raise _unequal(table, name)
        else:
            shape.append(int(counts[0]) if len(counts) else 0)
    if not _is_number(values.type):
        raise BadData(
            f"{table.path} has lists of {values.type} in the column '{name}'; give lists of numbers"
        )
    if values.null_count:
        values = values.cast(arrow.float64())
    numbers: Array = np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
    return lengths, numbers


def _unequal(table: Table, name: str) -> BadData:
    return BadData(
        f"{table.path} has lists of several lengths in the lists of the column '{name}'; only the outer "
        "lists may have several lengths"
    )


def _is_number(kind: Any) -> bool:
    types = arrow_package().types
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
    )


def _is_list(kind: Any) -> bool:
    types = arrow_package().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _holds_pictures(kind: Any) -> bool:
    """Tell whether values are the content of files, or structures with it, as Hugging Face has them."""
    types = arrow_package().types
    if types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _holds_pictures(kind.field(at).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _pictures(table: Table, name: str) -> Pictures:
    """Return the pictures of a column."""
    arrow = arrow_package()
    values = table.column(name)
    if not len(values):
        raise BadData(f"{table.path} has no rows")
    if arrow.types.is_struct(values.type):
        values = arrow.chunked_array([block.field("bytes") for block in values.chunks])

    def content(number: int) -> bytes:
        found: bytes | None = values[number].as_py()
        if not found:
            raise ValueError("there is none")
        return found

    names = [f"in row {number + 1:,}" for number in range(len(values))]
    return Pictures(table.path, [stamp(table.path), name], names, content)


def _classes(schema: Any, goals: list[str]) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of classes and their names, if the file has them as Hugging Face writes them."""
    try:
        kind = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][goals[0]]
        names, count = kind.get("names"), kind.get("num_classes")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None, ()
    if len(goals) > 1:
        return None, ()
    labels = tuple(map(str, names)) if isinstance(names, list) else ()
    return len(labels) or (count if type(count) is int and count > 0 else None), labels


def _write(contents: Contents[Stored[Rows], Array], path: Path) -> None:
    """Write a data set of one part; class names go where Hugging Face has them."""
    from pyarrow import parquet

    arrow = arrow_package()
    if len(contents.parts) > 1:
        raise BadData(
            f"'{contents.name}' has the parts {', '.join(contents.parts)}, and a Parquet file has one; give "
            "a name without an ending, for a folder, or one that ends in .npz or .h5"
        )
    inputs, targets = contents.parts["train"]
    if isinstance(inputs, Columns):
        raise BadData(
            f"'{contents.name}' has several inputs, or sequences of unequal length, and a Parquet file "
            "takes one of one shape; give a name without an ending, for a folder, or one that ends in .npz "
            "or .h5"
        )
    names = contents.columns or ("x",)
    if len({*names, _TARGET}) <= len(names) or any(name.strip().lower() in TARGET_WORDS for name in names):
        raise BadData(
            f"'{contents.name}' has columns of one name, or such as '{_TARGET}' among the inputs, so that no "
            "Parquet file can tell them apart: give a name without an ending, for a folder, or one that ends "
            "in .npz or .h5"
        )
    if contents.columns and inputs.dtype.kind in "iu":
        raise BadData(
            f"'{contents.name}' has columns of {inputs.dtype}, and columns of a Parquet file are read as "
            "floats: give a name without an ending, for a folder, or one that ends in .npz or .h5"
        )
    kind: dict[str, object] = {"num_classes": contents.classes, "_type": "ClassLabel"}
    if contents.labels:
        kind["names"] = list(contents.labels)
    features = {} if contents.classes is None else {_TARGET: kind}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    writer = None
    try:
        for start, chunk in chunks_of(inputs):
            columns = [column_of(one) for one in (chunk.T if contents.columns else [chunk])]
            columns.append(column_of(targets[start : start + len(chunk)]))
            table = arrow.table(columns, names=[*names, _TARGET], metadata=metadata)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table, row_group_size=max(1, len(chunk)))
    except arrow.ArrowException as error:
        raise BadData(f"'{contents.name}' fits into no Parquet file: {error}; give another ending") from error
    finally:
        if writer is not None:
            writer.close()


def column_of(values: Array) -> Any:
    """Return samples of any shape as a column of Arrow: of numbers, or of lists of one length."""
    arrow = arrow_package()
    native = values.dtype.newbyteorder("=")
    numbers = values.astype(np.float32 if values.dtype.kind == "b" else native, copy=False)
    found = arrow.array(np.ascontiguousarray(numbers).reshape(-1))
    for length in reversed(values.shape[1:]):
        found = arrow.FixedSizeListArray.from_arrays(found, length)
    return found
