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
from tutti.data.pile import Pile
from tutti.data.rows import Array, Indices, Rows, chosen
from tutti.data.tables import (
    Column,
    choose,
    groups_of,
    one_column,
    refuse_long_texts,
    targets_of,
)
from tutti.errors import BadData
from tutti.records.npz import damaged, open_data_file, refuse_larger_than_memory
from tutti.registry import part

_BLOCK_BYTES: Final = 1 << 24
"""Bytes of a block of rows that is read at a time, about."""

_MOST_ROWS: Final = 1 << 16
"""Rows of such a block: packed ones may take far more room than they say."""

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
        read: reads some columns, a block of rows after the other.
        refuse: makes the error for an input that is no number, from its name and those of all inputs.
    """

    path: Path
    schema: Any
    read: Callable[[Sequence[str]], Iterator[Any]]
    refuse: Callable[[Table, str, list[str]], BadData] | None = None

    @classmethod
    def of(
        cls, path: Path, table: Any, refuse: Callable[[Table, str, list[str]], BadData] | None = None
    ) -> Table:
        """Return a table of Arrow that is in memory."""
        step = _rows_of(table.nbytes, table.num_rows)
        return cls(path, table.schema, lambda names: iter(table.select(list(names)).to_batches(step)), refuse)

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
        """Read columns block by block: the number of the first row of each, and an array for each column."""
        done = 0
        for block in self.read(names):
            if block.num_rows:
                yield done, [block.column(name) for name in names]
                done += block.num_rows

    def column(self, name: str) -> Iterator[tuple[int, Any]]:
        """Read one column, likewise."""
        for start, (values,) in self.blocks([name]):
            yield start, values


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
    step = _rows_of(size, file.metadata.num_rows)
    return Table(
        path,
        file.schema_arrow,
        lambda names: file.iter_batches(step, columns=list(names), use_threads=False),
    )


def _open_arrow(path: Path) -> Table:
    arrow = arrow_package()
    file = arrow.ipc.open_file(arrow.memory_map(str(path)))

    def read(names: Sequence[str]) -> Iterator[Any]:
        for number in range(file.num_record_batches):
            batch = file.get_batch(number).select(list(names))
            step = _rows_of(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step)

    return Table(path, file.schema, read)


def _rows_of(nbytes: int, rows: int) -> int:
    """Return how many rows are read at a time."""
    return min(_MOST_ROWS, max(1, _BLOCK_BYTES * rows // max(1, nbytes)))


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
    numbers: Indices | None = None
    rows: int | None = None
    if labelled:
        targets, kept = targets_of([_target(table, name) for name in goals], missing, str(path))
        if choice.group is not None:
            groups = groups_of(_target(table, names[choice.group]), kept, str(path))
        numbers, rows = np.flatnonzero(kept), len(kept)
        if not len(numbers):
            raise BadData(f"{path} has no rows" + (" with a target" if len(kept) else ""))
    kinds = [table.schema.field(name).type for name in inputs]
    classes, labels = _classes(table.schema, goals)
    if len(inputs) == 1 and _holds_pictures(kinds[0]):
        stored = _pictures(table, inputs[0])
        _refuse_fewer(table, len(stored.names), rows)
        pictures, among = decoded_some(stored, numbers, size, skip_bad)
        goal = None if targets is None else targets[among]
        groups = None if groups is None else groups[among]
        return Contents(path.stem, {"train": (pictures, goal)}, classes, labels, groups=groups)
    if len(inputs) == 1 and _is_list(kinds[0]) and _unequal(table, inputs[0]):
        sequences = np.concatenate(
            [_sequences(table, inputs[0], values) for _, values in table.column(inputs[0])]
        )
        _refuse_fewer(table, len(sequences), rows)
        some = sequences if numbers is None else sequences[numbers]
        return Contents(path.stem, {"train": (some, targets)}, classes, labels, groups=groups)
    if len(inputs) == 1 and _is_list(kinds[0]):
        pieces, named = _lists(table, inputs[0]), ()
    else:
        pieces, named = _numbers(table, inputs), tuple(inputs)
    pile = Pile(path)
    for piece in pieces:
        pile.add(piece)
    _refuse_fewer(table, len(pile), rows)
    found = pile.rows() if numbers is None else chosen(pile.rows(), numbers)
    return Contents(path.stem, {"train": (found, targets)}, classes, labels, columns=named, groups=groups)


def _refuse_fewer(table: Table, there: int, due: int | None) -> None:
    """Refuse a table without rows, and one whose inputs have other rows than its targets."""
    if not there:
        raise BadData(f"{table.path} has no rows")
    if due not in (None, there):
        raise BadData(
            f"{table.path} is damaged: it has {due:,} targets, but {there:,} rows of inputs; copy it again"
        )


def _target(table: Table, name: str) -> Column:
    blocks = [_target_block(table, name, values) for _, values in table.column(name)]
    if not blocks:
        raise BadData(f"{table.path} has no rows")
    return one_column(blocks, str(table.path))


def _target_block(table: Table, name: str, values: Any) -> Column:
    arrow = arrow_package()
    kind = values.type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
        values = values.cast(kind)
    absent = np.asarray(values.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        texts = values.fill_null("").to_pylist()
        refuse_long_texts(texts, name, str(table.path))
        return Column(name, np.array(texts, dtype=str), absent)
    if _is_list(kind) and not absent.any():
        return Column(name, _list_block(table, name, 0, values), absent)
    if not _is_number(kind):
        raise BadData(
            f"{table.path} has values of type {kind} in the target '{name}'; give numbers, texts or lists of "
            "numbers, in each row"
        )
    filled = values.fill_null(False if arrow.types.is_boolean(kind) else 0)
    found: Array = np.asarray(filled.to_numpy(zero_copy_only=False))
    return Column(name, found, absent | (np.isnan(found) if found.dtype.kind == "f" else False))


def _numbers(table: Table, names: Sequence[str]) -> Iterator[Array]:
    """Return columns of numbers, side by side, in blocks; NaN: missing."""
    arrow = arrow_package()
    for name in names:
        if not _is_number(table.schema.field(name).type):
            raise (table.refuse or _no_numbers)(table, name, list(names))
    for _, arrays in table.blocks(names):
        found = np.empty((len(arrays[0]), len(names)), float_dtype())
        for at, values in enumerate(arrays):
            numbers = values.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
            found[:, at] = as_floats(np.asarray(numbers))
        yield found


def _no_numbers(table: Table, name: str, inputs: list[str]) -> BadData:
    """Return the error for a column of something else, with the first value."""
    kind = table.schema.field(name).type
    for start, values in table.column(name):
        at = next((at for at, value in enumerate(values) if value.is_valid), None)
        if at is not None:
            where = f"row {start + at + 1:,} has '{str(values[at])[:40]}'"
            break
    else:
        where = "all rows are empty"
    return BadData(
        f"{table.path} has values of type {kind} in the column '{name}', where numbers are due: {where}; "
        "choose the columns of numbers by --data.columns A,B,..."
    )


def _lists(table: Table, name: str) -> Iterator[Array]:
    """Return a column of lists of numbers, all equally long, in blocks."""
    first: tuple[int, ...] | None = None
    for start, values in table.column(name):
        found = _list_block(table, name, start, values)
        first = first or found.shape[1:]
        if found.shape[1:] != first:
            raise BadData(
                f"{table.path} has lists of several lengths in the column '{name}': {first} and, from row "
                f"{start + 1:,}, {found.shape[1:]}; give all one length"
            )
        yield found


def _list_block(table: Table, name: str, start: int, values: Any) -> Array:
    arrow = arrow_package()
    shape: list[int] = [len(values)]
    while _is_list(values.type):
        if values.null_count:
            raise BadData(f"{table.path} has no list in some rows of the column '{name}'; leave these out")
        lengths = np.asarray(arrow.compute.list_value_length(values).to_numpy(zero_copy_only=False))
        if len(lengths) and (lengths != lengths[0]).any():
            row = int((lengths != lengths[0]).argmax()) * shape[0] // len(lengths)
            raise BadData(
                f"{table.path} has lists of several lengths in the column '{name}': {lengths[0]} and, in row "
                f"{start + row + 1:,}, {lengths[lengths != lengths[0]][0]}; give all one length"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    return _numbers_in(table, name, values, shape)


def _unequal(table: Table, name: str) -> bool:
    """Tell whether a column has lists of several lengths."""
    arrow = arrow_package()
    found: set[int] = set()
    for _, values in table.column(name):
        found |= set(arrow.compute.list_value_length(values).drop_null().unique().to_pylist())
    return len(found) > 1


def _sequences(table: Table, name: str, values: Any) -> Array:
    """Return lists of numbers as an array of arrays."""
    if values.null_count:
        raise BadData(f"{table.path} has no list in some rows of the column '{name}'; leave these out")
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in values])])
    flat = _flat(table, name, values.flatten())
    found: Array = np.empty(len(values), object)
    for at in range(len(values)):
        found[at] = flat[offsets[at] : offsets[at + 1]]
    return found


def _flat(table: Table, name: str, values: Any) -> Array:
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


def _numbers_in(table: Table, name: str, values: Any, shape: list[int]) -> Array:
    """Return the numbers in lists, in a shape."""
    arrow = arrow_package()
    if not _is_number(values.type):
        raise BadData(
            f"{table.path} has lists of {values.type} in the column '{name}'; give lists of numbers"
        )
    if values.null_count:
        values = values.cast(arrow.float64())
    found: Array = np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
    return found


def _is_number(kind: Any) -> bool:
    types = arrow_package().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


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
    """Return the pictures of a column; the contents of their files are gathered first."""
    pile, ends = Pile(table.path), [0]
    for _, values in table.column(name):
        if arrow_package().types.is_struct(values.type):
            values = values.field("bytes")
        files = [value or b"" for value in values.to_pylist()]
        ends += (ends[-1] + np.cumsum([len(one) for one in files])).tolist()
        pile.add(np.frombuffer(b"".join(files), np.uint8))
    if len(ends) == 1:
        raise BadData(f"{table.path} has no rows")
    contents = pile.rows()

    def content(number: int) -> bytes:
        if ends[number] == ends[number + 1]:
            raise ValueError("there is none")
        return contents[ends[number] : ends[number + 1]].tobytes()

    names = [f"in row {number + 1:,}" for number in range(len(ends) - 1)]
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
    arrow = arrow_package()
    native = values.dtype.newbyteorder("=")
    numbers = values.astype(np.float32 if values.dtype.kind == "b" else native, copy=False)
    found = arrow.array(np.ascontiguousarray(numbers).reshape(-1))
    for length in reversed(values.shape[1:]):
        found = arrow.FixedSizeListArray.from_arrays(found, length)
    return found
