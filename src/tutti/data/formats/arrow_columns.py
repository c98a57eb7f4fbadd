"""Arrow columns as a table to prepare: one float for each row and column, NaN for a missing value.

numbers           as they are; true and false are 1 and 0
texts             their numbers in a dictionary of these data
dates, times      days since 1970, in fractions
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tutti.data.arrays import as_floats, float_dtype, tell_if_rounded
from tutti.data.rows import Array
from tutti.data.tables import CHOICES, LIKE, PREPARE
from tutti.errors import BadData, BadOption
from tutti.records.preparation import DATE, EMPTY, NUMBER, OTHER, TEXT, Table, TableColumn
from tutti.records.texts import printable

T = TypeVar("T")
R = TypeVar("R")

MOST_TEXTS: Final = 100_000
"""A column of more different texts, and of fewer than ten rows for each, is left out."""

_DAYS: Final = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d")
_FORMS: Final = ("", *(day + time for day, time in product(_DAYS, ("", " %H:%M", " %H:%M:%S"))))
"""Forms of dates in texts, with years of four digits; the first is ISO 8601."""

_WHOLE: Final = r"^[+-]?\d+$"
_CODE: Final = r"^0\d+$"
_NUMBER: Final = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_AMOUNT: Final = r"^[+-]?[$€£¥]\s?[\d,.]+$|^[+-]?[\d,.]+\s?%$"

_SIGNED: Final = (
    *(rf"^([-.]+|[+-]?[{sign}]\s?[+-]?(\d{{1,3}}(,\d{{3}})+|\d+)(\.\d*)?)$" for sign in "$€£¥"),
    r"^([-.]+|[+-]?\d+\.?\d*\s?%)$",
    r"^([-.]+|[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?)$",
)
"""Forms of numbers in texts of which some may be marks of gaps; the last has no sign."""

_DAY_US: Final = 86_400e6

_BLOCK: Final = 1 << 13
"""Rows that are copied at once, so that they stay in the cache while all columns are written."""


def is_prepared(options: Mapping[str, Any]) -> bool:
    """Return whether to prepare a table."""
    for name, choices in CHOICES.items():
        if options.get(name, choices[0]) not in choices:
            raise BadOption(f"--data.{name} is {options[name]!r}; give one of {', '.join(choices)}")
    return bool(options.get(PREPARE, "auto") == "auto")


def stored_table(
    path: Path, table: Any, names: Sequence[str], options: Mapping[str, Any]
) -> tuple[Array, Table]:
    """Return Arrow columns as floats of shape (rows, columns), and their description.

    `options` are the user's for tables.
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
        return TableColumn(name, str(kind)), plain_numbers(values)

    every = dict(zip(names, _in_threads(stored, names), strict=True))
    left_out = {name: f"{one:,} texts" for name, one in every.items() if isinstance(one, int)}
    read = [one for one in every.values() if not isinstance(one, int)]
    for column, values in read:
        if column.kind in (NUMBER, DATE):
            tell_if_rounded(column.name, *_chunks(values, 0, table.num_rows))
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
    """Return the results of `work` for each item; all threads keep floats in the same dtype."""
    contexts = [copy_context() for _ in items]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda context, item: context.run(work, item), contexts, items))


def _chunks(values: Any, start: int, stop: int) -> Iterator[Array]:
    """Yield a stretch of a column, an array or an Arrow column, piece by piece."""
    if isinstance(values, np.ndarray):
        yield values[start:stop]
    else:
        yield from map(_plain, values.slice(start, stop - start).chunks)


def as_array(values: Any) -> Array:
    """Return a column of numbers or booleans, with NaN for nulls. Arrow's `to_numpy` would import pandas."""
    return np.concatenate([_plain(chunk) for chunk in values.chunks])


def _plain(chunk: Any) -> Array:
    """Return Arrow numbers or booleans, as they lie in memory if none is null."""
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
    """Return the kind of columns of an Arrow type; None: they are no plain columns."""
    from pyarrow import types

    tests = {
        NUMBER: (
            *(types.is_integer, types.is_floating, types.is_boolean),
            *(types.is_decimal, types.is_time, types.is_duration),
        ),
        TEXT: (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary),
        DATE: (types.is_date, types.is_timestamp),
        EMPTY: (types.is_null,),
    }
    return next((name for name, some in tests.items() if any(test(kind) for test in some)), None)


def plain_numbers(values: Any) -> Any:
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

    try:
        return _cast(values, wanted)
    except pyarrow.ArrowException as error:
        raise BadData(
            f"{path} has other values in the column '{wanted.name}' than the training, where they are of the "
            f"kind {wanted.kind}: {printable(str(error)[:200])}; fix it"
        ) from error


def _cast(values: Any, wanted: TableColumn) -> Any:
    """Return a column in the kind of another table's; raise ArrowException if a value does not fit."""
    import pyarrow

    kind = kind_of(values.type)
    if kind == wanted.kind:
        return values
    if (kind, wanted.kind) == (TEXT, DATE):
        return _parsed(pyarrow.compute.utf8_trim_whitespace(values), wanted.form)
    if (kind, wanted.kind) == (TEXT, NUMBER):
        values = _without_signs(pyarrow.compute.utf8_trim_whitespace(values))
    if (kind, wanted.kind) == (NUMBER, DATE):
        raise pyarrow.ArrowInvalid("numbers may be days or seconds")
    kinds = {NUMBER: pyarrow.float64(), DATE: pyarrow.timestamp("us")}
    return values.cast(kinds.get(wanted.kind, pyarrow.string()))


def _parsed(texts: Any, form: str) -> Any:
    """Return texts as timestamps; raise ArrowInvalid if one does not have the form."""
    import pyarrow
    from pyarrow import compute

    if form and not compute.all(compute.match_substring_regex(texts, r"\d{4}")).as_py():
        raise pyarrow.ArrowInvalid("no years of four digits")
    if form:
        found = _timestamps(texts, form)
        others = texts.filter(compute.xor(found.is_null(), texts.is_null()))
        if len(others):
            raise pyarrow.ArrowInvalid(f"'{others[0]}' is no date")
        return found
    with suppress(pyarrow.ArrowInvalid):
        return texts.cast(pyarrow.timestamp("us"))
    return texts.cast(pyarrow.timestamp("us", "UTC"))


def _timestamps(texts: Any, form: str) -> Any:
    """Return texts as timestamps; null if one does not have the form, or is no day, as 30.02.2024.

    Arrow takes that for March 1.
    """
    from pyarrow import compute

    found = compute.strptime(texts, format=form, unit="us", error_is_null=True)
    before = form.partition("%d")[0].replace("%m", r"\d+").replace("%Y", r"\d+").replace(".", r"\.")
    day = compute.struct_field(compute.extract_regex(texts, rf"^{before}(?P<day>\d+)"), "day")
    fits = compute.equal(compute.day(found), day.cast("int64"))
    return compute.if_else(compute.coalesce(fits, True), found, None)


def _texts(path: Path, values: Any, wanted: TableColumn, most: float) -> tuple[TableColumn, Array] | int:
    """Return texts as their numbers, or as days if they are dates; or their count if that exceeds `most`.

    Texts of the column `wanted` keep their numbers, and all others get the number of `OTHER`, if it is there;
    nothing is known of a column that is `EMPTY`.
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
    plain = guessed and not categorical and len(texts) > 0
    form = _date_form(texts) if plain else None
    amounts = _amounts(texts) if plain else None
    if plain and form is None and amounts is None and most:
        _refuse_mistakes(path, wanted.name, texts, codes)
    if guessed and not len(texts):
        column, known = wanted, np.empty(0)
    elif form is not None:
        column = TableColumn(wanted.name, DATE, form=form)
        known = _days(pyarrow.chunked_array([_parsed(texts, form)]))
    elif amounts is not None:
        column, known = TableColumn(wanted.name, NUMBER), as_array(pyarrow.chunked_array([amounts]))
    elif guessed and len(texts) > most:
        return len(texts)
    else:
        found = texts.to_pylist()
        numbers = {text: number for number, text in enumerate(wanted.texts)}
        if OTHER in numbers and path.is_file():
            new = np.isin(codes, [code for code, text in enumerate(found) if text not in numbers]).sum()
            told = f"{path}: {new:,} of {len(codes):,} values of '{wanted.name}' are no category of the model"
            if new:
                print(told, file=sys.stderr)
        if OTHER not in numbers:
            for text in sorted({*found} - numbers.keys()):
                numbers[text] = len(numbers)
        column = TableColumn(wanted.name, TEXT, tuple(numbers))
        known = np.array([numbers.get(text, len(numbers) - 1) for text in found], np.float64)
    return column, np.append(as_floats(known), as_floats(np.array([np.nan])))[codes]


def _date_form(texts: Any) -> str | None:
    """Return the only date form of all texts; None: they are no dates, or of several forms."""
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


def _without_signs(texts: Any) -> Any:
    """Return numbers without a leading currency sign or a trailing %; - and . become nulls.

    Commas between thousands are removed only behind a leading sign: 1.234 is another number elsewhere.
    """
    from pyarrow import compute, scalar, string

    plain = compute.replace_substring_regex(texts, r"^([+-]?)[$€£¥]\s?|\s?%$", r"\1")
    first = compute.match_substring_regex(texts, r"^[+-]?[$€£¥]")
    plain = compute.if_else(first, compute.replace_substring_regex(plain, r",(\d{3})\b", r"\1"), plain)
    return compute.if_else(compute.match_substring_regex(plain, r"^[-.]+$"), scalar(None, string()), plain)


def _amounts(texts: Any) -> Any | None:
    """Return texts as numbers, if all are, and have signs or marks of gaps; else None."""
    from pyarrow import compute, float64

    if any(compute.all(compute.match_substring_regex(texts, form)).as_py() for form in _SIGNED):
        plain = _without_signs(texts)
        if not plain.equals(texts) and plain.null_count < len(plain):
            return plain.cast(float64())
    return None


def _refuse_mistakes(path: Path, name: str, texts: Any, codes: Array) -> None:
    """Refuse a few other texts among numbers or dates, unless numbers are names, as 1, 2 and 3a or 007."""
    from pyarrow import compute

    def which(pattern: str) -> Array:
        return _plain(compute.match_substring_regex(texts, pattern))

    counts = np.bincount(codes[codes >= 0], minlength=len(texts))
    for what, fits in (("numbers", which(_NUMBER) | which(_AMOUNT)), ("dates", _are_dates(texts))):
        others = ~fits
        names = which(_WHOLE)[fits].all() and fits.sum() <= min(30, counts[fits].sum() / 2)
        few = 0 < others.sum() <= 5 and counts[others].sum() <= 0.1 * counts.sum()
        if few and not names and not which(_CODE).any():
            row = int(np.isin(codes, np.flatnonzero(others)).argmax())
            second = "; delete it if it is a second line of names" if row == 0 else ""
            raise BadData(
                f"{path} has {what} in the column '{name}', but in row {row + 1:,} "
                f"'{texts[codes[row]].as_py()[:80]}'{second}; fix it, or leave the column out by "
                "--data.columns"
            )


def _are_dates(texts: Any) -> Array:
    """Return which texts are dates of the most common form; for ISO 8601 only days are checked."""
    from pyarrow import compute

    days = compute.utf8_slice_codeunits(texts, 0, 10)

    def fits(form: str, count: int) -> Array:
        some = (texts if form else days).slice(0, count)
        return _plain(_timestamps(some, form or "%Y-%m-%d").is_valid())

    return fits(max(_FORMS, key=lambda form: fits(form, 100).sum()), len(texts))
