"""Arrow tables: columns of numbers, of lists of numbers, or of pictures. Files and frames become these."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.data.arrays import as_floats
from tutti.data.columns import Column
from tutti.data.contents import PARTS, Contents
from tutti.data.formats.arrow_columns import as_array, is_prepared, kind_of, plain_numbers, stored_table
from tutti.data.pictures import Pictures, decoded, stamp
from tutti.data.rows import Array, Indices, Rows, chosen
from tutti.data.structure import sequence_column
from tutti.data.tables import ChosenColumns, choose
from tutti.errors import BadData, BadOption
from tutti.records.npz import damaged
from tutti.records.preparation import EMPTY, NUMBER, Table
from tutti.records.texts import printable

_NUMBERS: Final = (NUMBER, EMPTY)
"""The kinds of columns that hold numbers, if anything."""


def arrow_package() -> Any:
    """Return pyarrow, which is imported only for data that need it."""
    import pyarrow
    import pyarrow.compute  # `pyarrow` alone does not load it.

    # OMP_NUM_THREADS says how many threads a rank trains with.
    if pyarrow.cpu_count() < (cores := len(os.sched_getaffinity(0))):
        pyarrow.set_cpu_count(cores)
    return pyarrow


def is_frame(value: object) -> bool:
    """Return whether a value is a table in memory: a pandas or polars frame, or an Arrow table."""
    package = type(value).__module__.partition(".")[0]
    return type(value).__name__ in ("DataFrame", "Table") and package in ("pandas", "polars", "pyarrow")


def frames_of(data: object, options: dict[str, object]) -> dict[str, Any]:
    """Return the frame of each part, including separately given targets; {}: other data.

    Data are a frame, (frame, targets), a pair of these, (frame, test frame) or frames by part; the option
    "target" becomes the names of separately given targets.
    """
    if isinstance(data, Mapping):
        framed = "train" in data and {*data} <= {*PARTS} and all(map(is_frame, data.values()))
        return {PARTS[part]: data[part] for part in sorted(data, key="train".__ne__)} if framed else {}
    if is_frame(data):
        return {"train": data}
    given: Any = data if isinstance(data, tuple | list) and len(data) == 2 else ()
    if given and all(map(is_frame, given)) and "target" in options:
        return dict(zip(("train", "test"), given, strict=True))
    pairs = [given] if given and is_frame(given[0]) else given
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and is_frame(pair[0]) for pair in pairs):
        return {}
    return {
        part: _with_targets(pair[0], pair[1], options)
        for part, pair in zip(("train", "test"), pairs, strict=False)
    }


def _with_targets(frame: Any, targets: Any, options: dict[str, object]) -> Any:
    """Return a frame with its targets as further columns."""
    table = arrow_table(frame)
    if hasattr(targets, "to_frame"):
        targets = targets.to_frame(str(targets.name or "target"))
    if not is_frame(targets):
        targets = arrow_package().table({"target": np.asarray(targets).tolist()})
    columns = arrow_table(targets)
    if len(columns) != len(table):
        raise BadData(f"there are {len(columns):,} targets for {len(table):,} rows; give one for each")
    for name in columns.column_names:
        table = table.append_column(name, columns.column(name))
    wanted = options.setdefault("target", columns.column_names)
    if wanted not in (columns.column_names, columns.column_names[0]):
        raise BadOption(f"the targets beside the table are {columns.column_names}, but target is {wanted}")
    return table


def arrow_table(frame: Any) -> Any:
    """Return a table in memory as an Arrow table."""
    arrow, name = arrow_package(), type(frame).__name__
    try:
        if type(frame).__module__.startswith("pandas"):
            return arrow.Table.from_pandas(frame, preserve_index=False)
        return frame if isinstance(frame, arrow.Table) else frame.to_arrow()
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise BadData(
            f"the {name} is no table that Arrow can hold: {str(error)[:200]}; give each column a different "
            "name, and plain numbers or texts"
        ) from error


def read_frame(frame: Any, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
    """Read a table in memory; `options` are `TABLE_OPTIONS` and "missing"."""
    table, name = arrow_table(frame), type(frame).__name__
    contents = read_table(Path(f"the {name}"), table.schema, table.select, options, labelled)
    return replace(contents, name=name)


def table_of(path: Path, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return samples, each with its values by name, as an Arrow table; `path` is for messages."""
    arrow, columns = arrow_package(), {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = arrow.array([row.get(name) for row in rows])
        except (arrow.ArrowException, OverflowError) as error:
            raise BadData(
                f"{path} has values of several kinds in '{printable(name)}': {printable(str(error)[:200])}"
            ) from error
    return arrow.table(columns)


def read_table(
    path: Path,
    schema: Any,
    read: Callable[[list[str]], Any],
    options: Mapping[str, Any],
    labelled: bool = True,
    pictures: Pictures | None = None,
) -> Contents[object]:
    """Read a table.

    Args:
        path: of the file, or its description, for messages.
        schema: of all columns.
        read: returns the columns with some names as an Arrow table.
        options: `TABLE_OPTIONS`, "missing" and "size".
        labelled: whether targets are needed.
        pictures: the input, if it is pictures outside a column.
    """
    choice = choose(schema.names, options, str(path), labelled)
    further = (one for one in (choice.group, choice.weight) if one is not None)
    arrow = arrow_package()
    try:
        table = read([*choice.inputs, *choice.targets, *further])
    except (arrow.ArrowException, OSError) as error:
        raise damaged(path, error) from error
    if not table.num_rows:
        raise BadData(f"{path} has no rows")
    rows = np.arange(table.num_rows)
    if labelled:
        rows = _rows_with_targets(path, table, choice, options.get("missing", "error"))
    first = choice.inputs[0]
    values: object = None
    stored = None
    if len(choice.inputs) == 1 and _holds_pictures(schema.field(first).type):
        pictures = pictures or _pictures(path, table.column(first), first)
        values = chosen(decoded(pictures, options.get("size")), rows)
    else:
        values, stored = _inputs(path, table, rows, choice.inputs, options)
    selected = table if len(rows) == table.num_rows else table.take(rows)
    targets = _targets(path, selected, choice.targets) if labelled else None
    groups, weights = (
        None if name is None else _target(path, selected.column(name), name)
        for name in (choice.group, choice.weight)
    )
    stem = path.name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[0]
    return Contents(
        stem,
        {"train": (values, targets)},
        labels=_class_names(schema, choice.targets),
        columns=() if stored is None else tuple(column.name for column in stored.columns),
        groups=groups,
        table=stored if is_prepared(options) else None,
        targets=choice.targets,
        weights={} if weights is None else {"train": weights},
        left_out={} if selected is table else {"train": np.delete(np.arange(table.num_rows), rows)},
    )


def _inputs(
    path: Path, table: Any, rows: Indices, names: Sequence[str], options: Mapping[str, Any]
) -> tuple[object, Table | None]:
    """Return plain columns as one array, with their description; or each by its name if there are lists.

    All rows decide the kinds of columns, and which values are mistakes.
    """
    kinds = {name: kind_of(table.schema.field(name).type) for name in names}
    plain = None not in kinds.values()
    numbers = [name for name, kind in kinds.items() if kind in _NUMBERS or _is_list(table.column(name).type)]
    if len(numbers) < len(names) and not (plain and is_prepared(options)):
        other = next(name for name in names if name not in numbers)
        raise BadData(
            f"{path} has values of type {table.column(other).type} in the column '{other}', where numbers "
            f"are due; choose the columns of numbers by --data.columns {','.join(numbers) or 'A,B'}"
        )
    if plain:
        matrix, stored = stored_table(path, table, names, options)
        return matrix if len(rows) == len(matrix) else matrix[rows], stored
    table = table if len(rows) == table.num_rows else table.take(rows)
    each = {name: _values(path, table.column(name), name) for name in names}
    return each if len(each) > 1 else each[names[0]], None


def _rows_with_targets(path: Path, table: Any, choice: ChosenColumns, missing: str) -> Indices:
    """Return the rows with all targets."""
    absent = {
        name: _absent(table.column(name)) for name in (*choice.targets, choice.group) if name is not None
    }
    lacking = np.logical_or.reduce([absent[name] for name in choice.targets])
    if lacking.any() and missing == "error":
        row = int(lacking.argmax())
        name = next(name for name in choice.targets if absent[name][row])
        raise BadData(
            f"{path} has no value in row {row + 1:,} of the target '{name}'; targets are missing in "
            f"{int(lacking.sum()):,} rows: leave these out by --data.missing drop"
        )
    if lacking.all():
        raise BadData(f"{path} has no rows with a target")
    if lacking.any():
        print(
            f"{lacking.sum():,} of {len(lacking):,} rows of {path} have no target and are left out",
            file=sys.stderr,
        )
    if choice.group is not None and (alone := absent[choice.group] & ~lacking).any():
        raise BadData(
            f"{path} has no value in row {int(alone.argmax()) + 1:,} of the column '{choice.group}', "
            "by which samples are grouped; give each sample a group"
        )
    return np.flatnonzero(~lacking)


def _absent(values: Any) -> NDArray[np.bool_]:
    """Return a mask of null or NaN values."""
    return as_array(arrow_package().compute.is_null(values, nan_is_null=True))


def _targets(path: Path, table: Any, names: Sequence[str]) -> Array:
    """Return targets: one for each row, or several numbers."""
    targets = [_target(path, table.column(name), name) for name in names]
    if len(targets) == 1:
        return targets[0]
    stacked = np.stack(targets, axis=1)
    return as_floats(stacked) if stacked.dtype.kind == "f" else stacked


def _target(path: Path, values: Any, name: str) -> Array:
    types, kind = arrow_package().types, values.type
    if types.is_dictionary(kind):
        return _target(path, values.cast(kind.value_type), name)
    if kind_of(kind) in _NUMBERS:
        return as_array(values if types.is_boolean(kind) else plain_numbers(values))
    if kind_of(kind) is not None:
        return np.array(values.cast(arrow_package().string()).to_pylist(), dtype=str)
    lists = _lists(path, values, name) if _is_list(kind) else None
    if isinstance(lists, np.ndarray):
        return lists
    raise BadData(
        f"{path} has values of type {kind}, or lists of several lengths, in '{name}'; give numbers, texts or "
        "lists of numbers of one length"
    )


def _values(path: Path, values: Any, name: str) -> object:
    """Return one of several inputs: lists, or one number for each sample."""
    if _is_list(values.type):
        return _lists(path, values, name)
    numbers = as_array(plain_numbers(values))
    return as_floats(numbers) if numbers.dtype.kind == "f" else numbers.astype(np.int64)


def _lists(path: Path, values: Any, name: str) -> Array | Column[Rows]:
    """Return a column of lists: an array, or sequences if the outer lists have several lengths."""
    arrow = arrow_package()
    values = values.combine_chunks()
    counts: list[Array] = []
    while _is_list(values.type):
        if values.null_count:
            raise BadData(f"{path} has no list in some rows of the column '{name}'; leave these out")
        found = arrow.compute.list_value_length(values).to_numpy(zero_copy_only=False)
        counts.append(np.asarray(found, np.int64))
        values = values.flatten()
    if kind_of(values.type) not in _NUMBERS:
        raise BadData(f"{path} has lists of {values.type} in the column '{name}'; give lists of numbers")
    lengths, *inner = counts
    if any(len({*some.tolist()}) > 1 for some in inner):
        raise BadData(
            f"{path} has lists of several lengths in the lists of the column '{name}'; only the outer lists "
            "may have several lengths"
        )
    shape = [int(some[0]) if len(some) else 0 for some in inner]
    numbers = as_array(arrow.chunked_array([plain_numbers(values)])).reshape(lengths.sum(), *shape)
    if len({*lengths.tolist()}) > 1:
        return sequence_column(numbers, lengths)
    return numbers.reshape(len(lengths), -1 if len(numbers) else 0, *shape)


def _is_list(kind: Any) -> bool:
    types = arrow_package().types
    return any(is_it(kind) for is_it in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _holds_pictures(kind: Any) -> bool:
    """Return whether values are the contents of files, alone or in Hugging Face's structures."""
    types = arrow_package().types
    if types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _holds_pictures(kind.field(at).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _pictures(path: Path, values: Any, name: str) -> Pictures:
    arrow = arrow_package()
    if arrow.types.is_struct(values.type):
        values = arrow.chunked_array([block.field("bytes") for block in values.chunks])
    names = [f"in row {number:,}" for number in range(1, len(values) + 1)]
    return Pictures(path, [stamp(path), name], names, lambda number: values[number].as_py() or b"")


def _class_names(schema: Any, goals: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes, if the file has them like Hugging Face's files."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][goals[0]]["names"]
    except (KeyError, ValueError, TypeError, IndexError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) and len(goals) == 1 else ()
