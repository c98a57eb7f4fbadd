"""Parquet and Arrow files: columns of numbers, of lists of numbers, or of pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.arrays import chunks_of, float_dtype
from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.items import TARGET_WORDS
from tutti.data.pictures import Pictures, decoded_some, stamp
from tutti.data.rows import Array, Rows, chosen, joined
from tutti.data.tables import Column, choose, targets_of
from tutti.errors import BadData
from tutti.load_object import optional_package
from tutti.records.npz import open_data_file, refuse_larger_than_memory
from tutti.registry import part

_TARGET: Final = "target"
"""The name of the target in files that are written."""


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
        """
        arrow = optional_package("pyarrow", "Parquet and Arrow files")
        with open_data_file(path) as file:
            packed = file.read(len(Parquet.start)) == Parquet.start
        try:
            table = _open_parquet(path) if packed else _open_arrow(path)
            return _read(table, target, columns, missing, size, bool(skip_bad), labelled)
        except (arrow.ArrowException, OSError, MemoryError) as error:
            length = path.stat().st_size
            raise BadData(
                f"{path} is truncated or damaged ({length:,} bytes): {str(error)[:200]}; copy it again"
            ) from error

    @staticmethod
    @override
    def write(contents: Contents[Rows, Array], path: Path) -> None:
        """Write a table: a column for each input that has a name, else one of lists."""
        _write(contents, path)


@part("Arrow")
class Arrow(Parquet):
    """Arrow files, which are also called Feather; as Parquet ones."""

    start = b"ARROW1"
    written = ""


@dataclass(frozen=True)
class _Table:
    """A table in a file.

    Attributes:
        path: of the file.
        schema: of its columns.
        rows: their number.
        blocks: the number of stretches of rows that are read one at a time.
        read: returns some columns of a block.
    """

    path: Path
    schema: Any
    rows: int
    blocks: int
    read: Callable[[int, Sequence[str]], Any]

    def columns(self, names: Sequence[str], block: int) -> list[Any]:
        """Read columns of a block, each as one array."""
        found = self.read(block, names)
        arrays = [found.column(name) for name in names]
        return [one.combine_chunks() if hasattr(one, "combine_chunks") else one for one in arrays]


def is_frame(value: object) -> bool:
    """Tell whether a value is a table in memory: a frame of pandas or polars, or a table of Arrow."""
    return type(value).__name__ in ("DataFrame", "Table") and type(value).__module__.partition(".")[0] in (
        "pandas",
        "polars",
        "pyarrow",
    )


def read_frame(
    frame: Any, target: object = None, columns: object = None, missing: str = "error", labelled: bool = True
) -> Contents[object]:
    """Read a table in memory, as one in a file.

    Args:
        frame: of pandas or polars, or a table of Arrow.
        target: as for `Parquet.read`.
        columns: likewise.
        missing: likewise.
        labelled: likewise.

    Raises:
        BadData: as for a file; or pandas holds what is no column of one kind.
    """
    arrow, name = optional_package("pyarrow", "data frames"), type(frame).__name__
    try:
        if type(frame).__module__.startswith("pandas"):
            table = arrow.Table.from_pandas(frame, preserve_index=False)
        else:
            table = frame if isinstance(frame, arrow.Table) else frame.to_arrow()
    except arrow.ArrowException as error:
        raise BadData(f"the {name} has a column that is not of one kind: {str(error)[:200]}") from error
    found = _Table(
        Path(f"the {name}"), table.schema, table.num_rows, 1, lambda _, names: table.select(list(names))
    )
    return replace(_read(found, target, columns, missing, None, False, labelled), name=name)


def _open_parquet(path: Path) -> _Table:
    parquet = optional_package("pyarrow.parquet", "Parquet files")
    file = parquet.ParquetFile(path, memory_map=True)
    sizes = (file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
    refuse_larger_than_memory(path, sum(sizes))
    return _Table(
        path,
        file.schema_arrow,
        file.metadata.num_rows,
        file.num_row_groups,
        lambda block, names: file.read_row_group(block, list(names), use_threads=False),
    )


def _open_arrow(path: Path) -> _Table:
    arrow = optional_package("pyarrow", "Arrow files")
    file = arrow.ipc.open_file(arrow.memory_map(str(path)))
    return _Table(
        path,
        file.schema,
        sum(file.get_batch(number).num_rows for number in range(file.num_record_batches)),
        file.num_record_batches,
        lambda block, names: file.get_batch(block).select(list(names)),
    )


def _read(
    table: _Table,
    target: object,
    columns: object,
    missing: str,
    size: object,
    skip_bad: bool,
    labelled: bool,
) -> Contents[object]:
    path, names = table.path, table.schema.names
    choice = choose(names, target, columns, str(path), labelled)
    inputs, goals = ([names[at] for at in some] for some in (choice.inputs, choice.targets))
    targets: Array | None = None
    kept = np.ones(table.rows, dtype=bool)
    if labelled:
        targets, kept = targets_of([_target(table, name) for name in goals], missing, str(path))
    numbers = np.flatnonzero(kept)
    if not len(numbers):
        raise BadData(f"{path} has no rows" + (" with a target" if len(kept) else ""))
    kinds = [table.schema.field(name).type for name in inputs]
    classes, labels = _classes(table.schema, goals)
    if len(inputs) == 1 and _holds_pictures(kinds[0]):
        pictures, among = decoded_some(_pictures(table, inputs[0]), numbers, size, skip_bad)
        goal = None if targets is None else targets[among]
        return Contents(path.stem, {"train": (pictures, goal)}, classes, labels)
    if len(inputs) == 1 and _is_list(kinds[0]) and _unequal(table, inputs[0]):
        sequences = np.concatenate([_sequences(table, inputs[0], block) for block in range(table.blocks)])
        _refuse_fewer(table, sequences)
        return Contents(path.stem, {"train": (sequences[numbers], targets)}, classes, labels)
    if len(inputs) == 1 and _is_list(kinds[0]):
        rows = joined([_lists(table, inputs[0], block) for block in range(table.blocks)])
        _refuse_fewer(table, rows)
        return Contents(path.stem, {"train": (chosen(rows, numbers), targets)}, classes, labels)
    rows = joined([_numbers(table, inputs, block) for block in range(table.blocks)])
    _refuse_fewer(table, rows)
    return Contents(
        path.stem, {"train": (chosen(rows, numbers), targets)}, classes, labels, columns=tuple(inputs)
    )


def _refuse_fewer(table: _Table, rows: Rows) -> None:
    """Refuse a column that has other rows than the table says."""
    if len(rows) != table.rows:
        raise BadData(
            f"{table.path} is damaged: it says that it has {table.rows:,} rows, and has {len(rows):,} of its "
            "inputs; copy it again"
        )


def _target(table: _Table, name: str) -> Column:
    arrow = optional_package("pyarrow", "Parquet files")
    pieces = [table.columns([name], block)[0] for block in range(table.blocks)]
    values = arrow.chunked_array(pieces, table.schema.field(name).type)
    kind = values.type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
        values = values.cast(kind)
    absent = np.asarray(values.is_null().to_numpy(), dtype=bool)
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        return Column(name, np.array(values.fill_null("").to_pylist(), dtype=str), absent)
    if _is_list(kind) and not absent.any():
        lists = [_lists(table, name, block) for block in range(table.blocks)]
        return Column(name, np.concatenate(lists), absent)
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        raise BadData(
            f"{table.path} has values of type {kind} in the target '{name}'; give numbers, texts or lists of "
            "numbers, in each row"
        )
    filled = values.fill_null(False if arrow.types.is_boolean(kind) else 0)
    found: Array = np.asarray(filled.to_numpy())
    return Column(name, found, absent | (np.isnan(found) if found.dtype.kind == "f" else False))


def _numbers(table: _Table, names: list[str], block: int) -> Array:
    """Return columns of numbers, side by side; NaN: missing."""
    arrow = optional_package("pyarrow", "Parquet files")
    arrays = table.columns(names, block)
    found = np.empty((len(arrays[0]), len(names)), float_dtype())
    for at, (name, values) in enumerate(zip(names, arrays, strict=True)):
        kind = values.type
        if not (
            arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)
        ):
            one = next((str(value) for value in values if value.is_valid), "nothing")
            raise BadData(
                f"{table.path} has values of type {kind} in the column '{name}', such as '{one[:40]}', where "
                "numbers are due; choose the columns of numbers by --data.columns A,B,..."
            )
        found[:, at] = values.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def _lists(table: _Table, name: str, block: int) -> Array:
    """Return a column of lists of numbers, all equally long."""
    arrow = optional_package("pyarrow", "Parquet files")
    (values,) = table.columns([name], block)
    shape: list[int] = [len(values)]
    while _is_list(values.type):
        if values.null_count:
            raise BadData(f"{table.path} has no list in some rows of the column '{name}'; leave these out")
        lengths = np.asarray(arrow.compute.list_value_length(values).to_numpy(zero_copy_only=False))
        if len(lengths) and (lengths != lengths[0]).any():
            row = int((lengths != lengths[0]).argmax())
            raise BadData(
                f"{table.path} has lists of several lengths in the column '{name}': {lengths[0]} and, in row "
                f"{row + 1:,} of block {block}, {lengths[row]}; give all one length"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    return _numbers_in(table, name, values, shape)


def _unequal(table: _Table, name: str) -> bool:
    """Tell whether a column has lists of several lengths."""
    arrow = optional_package("pyarrow", "Parquet files")
    found: set[int] = set()
    for block in range(table.blocks):
        (values,) = table.columns([name], block)
        found |= set(arrow.compute.list_value_length(values).drop_null().unique().to_pylist())
    return len(found) > 1


def _sequences(table: _Table, name: str, block: int) -> Array:
    """Return a column of lists of numbers as an array of arrays."""
    (values,) = table.columns([name], block)
    if values.null_count:
        raise BadData(f"{table.path} has no list in some rows of the column '{name}'; leave these out")
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in values])])
    flat = _flat(table, name, values.flatten())
    found: Array = np.empty(len(values), object)
    for at in range(len(values)):
        found[at] = flat[offsets[at] : offsets[at + 1]]
    return found


def _flat(table: _Table, name: str, values: Any) -> Array:
    """Return the numbers in lists, which may be lists of equal length."""
    shape: list[int] = [len(values)]
    while _is_list(values.type):
        lengths = {len(one) for one in values}
        if len(lengths) > 1:
            raise BadData(
                f"{table.path} has lists of several lengths in the lists of the column '{name}'; only the "
                "outer lists may have several lengths"
            )
        shape.append(lengths.pop() if lengths else 0)
        values = values.flatten()
    return _numbers_in(table, name, values, shape)


def _numbers_in(table: _Table, name: str, values: Any, shape: list[int]) -> Array:
    """Return the numbers in lists, in a shape."""
    arrow, kind = optional_package("pyarrow", "Parquet files"), values.type
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
        raise BadData(f"{table.path} has lists of {kind} in the column '{name}'; give lists of numbers")
    if values.null_count:
        values = values.cast(arrow.float64())
    found: Array = np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
    return found


def _is_list(kind: Any) -> bool:
    types = optional_package("pyarrow", "Parquet files").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _holds_pictures(kind: Any) -> bool:
    """Tell whether values are the content of files, or structures with it, as Hugging Face has them."""
    types = optional_package("pyarrow", "Parquet files").types
    if types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _holds_pictures(kind.field(at).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _pictures(table: _Table, name: str) -> Pictures:
    contents: list[Any] = []
    for block in range(table.blocks):
        (values,) = table.columns([name], block)
        if optional_package("pyarrow", "Parquet files").types.is_struct(values.type):
            values = values.field("bytes")
        contents.append(values)
    values = optional_package("pyarrow", "Parquet files").chunked_array(contents)

    def content(number: int) -> bytes:
        found = values[number].as_py()
        if found is None:
            raise ValueError("there is none")
        return bytes(found)

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


def _write(contents: Contents[Rows, Array], path: Path) -> None:
    """Write a data set of one part; class names go where Hugging Face has them."""
    arrow, parquet = (optional_package(f"pyarrow{one}", "Parquet files") for one in ("", ".parquet"))
    if len(contents.parts) > 1:
        raise BadData(
            f"'{contents.name}' has the parts {', '.join(contents.parts)}, and a Parquet file has one; give "
            "a name without an ending, for a folder, or one that ends in .npz or .h5"
        )
    inputs, targets = contents.parts["train"]
    names = contents.columns or ("x",)
    if len({*names, _TARGET}) <= len(names) or any(name.strip().lower() in TARGET_WORDS for name in names):
        raise BadData(
            f"'{contents.name}' has columns of one name, or such as '{_TARGET}' among the inputs, so that no "
            "Parquet file can tell them apart: give a name without an ending, for a folder, or one that ends "
            "in .npz or .h5"
        )
    kind: dict[str, object] = {"num_classes": contents.classes, "_type": "ClassLabel"}
    if contents.labels:
        kind["names"] = list(contents.labels)
    features = {} if contents.classes is None else {_TARGET: kind}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    writer = None
    try:
        for start, chunk in chunks_of(inputs):
            columns = [_column(one) for one in (chunk.T if contents.columns else [chunk])]
            columns.append(_column(targets[start : start + len(chunk)]))
            table = arrow.table(columns, names=[*names, _TARGET], metadata=metadata)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table, row_group_size=max(1, len(chunk)))
    except arrow.ArrowException as error:
        raise BadData(f"'{contents.name}' fits into no Parquet file: {error}; give another ending") from error
    finally:
        if writer is not None:
            writer.close()


def _column(values: Array) -> Any:
    """Return samples of any shape as a column of Arrow: of numbers, or of lists of one length."""
    arrow = optional_package("pyarrow", "Parquet files")
    numbers = values.astype(np.float32) if values.dtype.kind == "b" else values
    found = arrow.array(np.ascontiguousarray(numbers).reshape(-1))
    for length in reversed(values.shape[1:]):
        found = arrow.FixedSizeListArray.from_arrays(found, length)
    return found
