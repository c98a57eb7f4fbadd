"""Columns of Arrow as a table to be prepared: one float for each row and column, NaN where there is no value.

numbers           as they are
true and false    1 and 0
texts             their numbers in a dictionary of these data
dates, times      days since 1970, in fractions
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tutti.data.arrays import as_floats, float_dtype
from tutti.data.rows import Array
from tutti.data.tables import CHOICES, LIKE, PREPARE
from tutti.errors import BadData, BadOption
from tutti.records.preparation import DATE, EMPTY, FLAG, NUMBER, OTHER, TEXT, Table, TableColumn

T = TypeVar("T")
R = TypeVar("R")

MOST_TEXTS: Final = 100_000
"""A column of more different texts, and of fewer than ten rows for each, is left out."""

_DAYS: Final = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d")
_FORMS: Final = ("", *(day + time for day, time in product(_DAYS, ("", " %H:%M", " %H:%M:%S"))))
"""Forms of dates in texts, with years of four digits; the first is ISO 8601."""

_WHOLE: Final = r"^[+-]?\d+$"
_NUMBER: Final = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"

_DAY_US: Final = 86_400e6

_BLOCK: Final = 1 << 13
"""Rows that are copied at once, so that they stay in the cache while all columns are written."""


def is_prepared(options: Mapping[str, Any]) -> bool:
    """Return whether a table is to be prepared.

    Raises:
        BadOption: an option has another value than those that there are.
    """
    for name, choices in CHOICES.items():
        if options.get(name, choices[0]) not in choices:
            raise BadOption(f"--data.{name} is {options[name]!r}; give one of {', '.join(choices)}")
    return bool(options.get(PREPARE, "auto") == "auto")


def stored_table(
    path: Path, table: Any, names: Sequence[str], options: Mapping[str, Any]
) -> tuple[Array, Table]:
    """Return columns as floats of shape (rows, columns), and what they are.

    Args:
        path: of the file, for messages.
        table: of Arrow.
        names: of the columns.
        options: those of tables.

    Raises:
        BadData: a few texts among numbers; or a column is not of the kind that it is to have.
    """
    like = {column.name: column for column in options.get(LIKE, ()) if column.kind != EMPTY}
    most = math.inf if "columns" in options else max(MOST_TEXTS, table.num_rows / 10)
    most = 0 if options.get("text") == "drop" else most

    def stored(name: str) -> tuple[TableColumn, Any] | int:
        values, wanted = table.column(name), like.get(name)
        values = values if wanted is None else _as_kind(path, values, wanted)
        kind = kind_of(values.type)
        if kind == TEXT:
            return _texts(path, values, wanted or TableColumn(name, EMPTY), most)
        if kind == DATE:
            return TableColumn(name, DATE, form=wanted.form if wanted else ""), _days(values)
        return TableColumn(name, str(kind)), _numbers(values)

    every = dict(zip(names, _in_threads(stored, names), strict=True))
    left_out = {name: f"{one:,} texts" for name, one in every.items() if isinstance(one, int)}
    read = [one for one in every.values() if not isinstance(one, int)]
    matrix = np.empty((table.num_rows, len(read)), float_dtype())

    def write(start: int) -> None:
        for at, (_, values) in enumerate(read):
            place = start
            for chunk in _chunks(values, start, start + _BLOCK):
                matrix[place : place + len(chunk), at] = as_floats(chunk)
                place += len(chunk)

    _in_threads(write, range(0, len(matrix), _BLOCK))
    return matrix, Table(tuple(column for column, _ in read), left_out, "columns" in options)


def _in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what `work` gives for each item; all threads keep floats in the same type."""
    contexts = [copy_context() for _ in items]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda context, item: context.run(work, item), contexts, items))


def _chunks(values: Any, start: int, stop: int) -> Iterator[Array]:
    """Yield a stretch of a column, which is an array or one of Arrow, piece by piece."""
    if isinstance(values, np.ndarray):
        yield values[start:stop]
    else:
        yield from map(_plain, values.slice(start, stop - start).chunks)


def as_array(values: Any) -> Array:
    """Return a column of numbers or booleans, with NaN for nulls. Arrow's `to_numpy` would import pandas."""
    return np.concatenate([_plain(chunk) for chunk in values.chunks])


def _plain(chunk: Any) -> Array:
    """Return numbers or booleans of Arrow, as they lie in memory if none is null."""
    import pyarrow

    mask, content = chunk.buffers()
    if pyarrow.types.is_boolean(chunk.type):
        found = _bits(content, chunk)
    else:
        dtype = np.dtype(chunk.type.to_pandas_dtype())
        found = np.frombuffer(content, dtype, len(chunk), chunk.offset * dtype.itemsize)
    return np.where(_bits(mask, chunk), found, np.nan) if chunk.null_count else found


def _bits(buffer: Any, chunk: Any) -> Array:
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[chunk.offset : chunk.offset + len(chunk)].astype(np.bool_)


def kind_of(kind: Any) -> str | None:
    """Return the kind of columns of a type of Arrow; None: they are no plain columns."""
    from pyarrow import types

    tests = {
        FLAG: (types.is_boolean,),
        NUMBER: (types.is_integer, types.is_floating, types.is_decimal, types.is_time, types.is_duration),
        TEXT: (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary),
        DATE: (types.is_date, types.is_timestamp),
        EMPTY: (types.is_null,),
    }
    return next((name for name, some in tests.items() if any(test(kind) for test in some)), None)


def _numbers(values: Any) -> Any:
    """Return a column as one of plain numbers; times are seconds."""
    import pyarrow

    if pyarrow.types.is_time(values.type) or pyarrow.types.is_duration(values.type):
        seconds = 1e-3 ** ("s", "ms", "us", "ns").index(values.type.unit)
        whole = values.cast(pyarrow.int64() if values.type.bit_width == 64 else pyarrow.int32())
        values = pyarrow.compute.multiply(whole.cast(pyarrow.float64(), safe=False), seconds)
    elif not (pyarrow.types.is_integer(values.type) or pyarrow.types.is_floating(values.type)):
        values = values.cast(pyarrow.float64())
    return values


def _days(values: Any) -> Array:
    import pyarrow

    if not pyarrow.types.is_date32(values.type):
        return as_array(values.cast(pyarrow.timestamp("us"), safe=False).cast(pyarrow.int64())) / _DAY_US
    return as_array(values.cast(pyarrow.int32()))


def _as_kind(path: Path, values: Any, wanted: TableColumn) -> Any:
    """Return a column in the kind of another table's."""
    import pyarrow

    found = kind_of(values.type)
    if found == wanted.kind:
        return values
    kinds = {NUMBER: pyarrow.float64(), FLAG: pyarrow.bool_(), DATE: pyarrow.timestamp("us")}
    try:
        if (found, wanted.kind) == (TEXT, DATE):
            return _parsed(pyarrow.compute.utf8_trim_whitespace(values), wanted.form)
        if (found, wanted.kind) == (NUMBER, DATE):
            raise pyarrow.ArrowInvalid("numbers may be days or seconds; give dates")
        if (found, wanted.kind) == (NUMBER, FLAG):
            flags = {0.0: False, 1.0: True}
            told = [
                None if one is None or one != one else flags.get(float(one), "") for one in values.to_pylist()
            ]
            return pyarrow.chunked_array([pyarrow.array(told, pyarrow.bool_())])
        texts = values.cast(kinds.get(wanted.kind, pyarrow.string()))
        if (found, wanted.kind) == (FLAG, TEXT):
            for spelled in (pyarrow.compute.utf8_capitalize, pyarrow.compute.utf8_upper):
                if spelled(pyarrow.scalar("true")).as_py() in wanted.texts:
                    return spelled(texts)
        return texts
    except pyarrow.ArrowException as error:
        raise BadData(
            f"{path} has values of type {values.type} in the column '{wanted.name}', and those of the "
            f"training are of the kind {wanted.kind}: {str(error)[:100]}"
        ) from error


def _parsed(texts: Any, form: str) -> Any:
    """Return texts as timestamps; raise ArrowInvalid if one is none of the form."""
    import pyarrow
    from pyarrow import compute

    if form and not compute.all(compute.match_substring_regex(texts, r"\d{4}")).as_py():
        raise pyarrow.ArrowInvalid("no years of four digits")
    if form:
        return compute.strptime(texts, format=form, unit="us")
    with suppress(pyarrow.ArrowInvalid):
        return texts.cast(pyarrow.timestamp("us"))
    return texts.cast(pyarrow.timestamp("us", "UTC"))


def _texts(path: Path, values: Any, wanted: TableColumn, most: float) -> tuple[TableColumn, Array] | int:
    """Return texts as their numbers, or as days where they are dates; the count of more texts than `most`.

    Texts of the column that is `wanted` keep their numbers, and all others get that of `OTHER`, if there is
    one; nothing is known of a column that is `EMPTY`.
    """
    import pyarrow

    categorical = pyarrow.types.is_dictionary(values.type)
    if categorical and any(chunk.dictionary.null_count for chunk in values.chunks):
        values = values.cast(pyarrow.string())
    plain = not pyarrow.types.is_dictionary(values.type)
    encoded = (values.dictionary_encode() if plain else values).combine_chunks()
    codes: Array = _plain(encoded.indices.fill_null(-1))
    texts = pyarrow.compute.utf8_trim_whitespace(encoded.dictionary.cast(pyarrow.string()))
    guessed = wanted.kind == EMPTY
    form = _date_form(texts) if guessed and not categorical and len(texts) else None
    if guessed and not len(texts):
        column, known = wanted, np.empty(0)
    elif form is not None:
        column, known = (
            TableColumn(wanted.name, DATE, form=form),
            _days(pyarrow.chunked_array([_parsed(texts, form)])),
        )
    elif guessed and len(texts) > most:
        return len(texts)
    else:
        if guessed and not categorical:
            _refuse_mistakes(path, wanted.name, texts, codes)
        found = texts.to_pylist()
        numbers = {text: number for number, text in enumerate(wanted.texts)}
        if OTHER not in numbers:
            for text in sorted({*found} - numbers.keys()):
                numbers[text] = len(numbers)
        column = TableColumn(wanted.name, TEXT, tuple(numbers))
        known = np.array([numbers.get(text, len(numbers) - 1) for text in found], np.float64)
    return column, np.append(as_floats(known), as_floats(np.array([np.nan])))[codes]


def _date_form(texts: Any) -> str | None:
    """Return the only form of dates in which all texts are; None: they are no dates, or of several."""
    import pyarrow

    forms: Sequence[str] = _FORMS
    for some in (texts.slice(0, 100), texts):
        fitting = []
        for form in forms:
            with suppress(pyarrow.ArrowInvalid):
                _parsed(some, form)
                fitting.append(form)
        forms = fitting
    return forms[0] if len(forms) == 1 else None


def _refuse_mistakes(path: Path, name: str, texts: Any, codes: Array) -> None:
    """Refuse numbers with a few other texts among them, unless whole numbers are names, as 1, 2 and 3a."""
    from pyarrow import compute

    is_number = _plain(compute.match_substring_regex(texts, _NUMBER))
    counts = np.bincount(codes[codes >= 0], minlength=len(texts))
    numbers, rows = texts.filter(is_number), counts[is_number].sum()
    whole = compute.all(compute.match_substring_regex(numbers, _WHOLE)).as_py()
    names = whole and len(numbers) <= min(30, rows / 2)
    if not 0 < len(texts) - len(numbers) <= 5 or rows < 0.9 * counts.sum() or names:
        return
    row = int(np.isin(codes, np.flatnonzero(~is_number)).argmax())
    second = "; delete it if it is a second line of names" if row == 0 else ""
    raise BadData(
        f"{path} has numbers in the column '{name}', but in row {row + 1:,} "
        f"'{texts[codes[row]].as_py()[:80]}'{second}; mend it, or leave the column out by --data.columns"
    )
