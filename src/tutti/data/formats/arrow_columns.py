"""Columns of Arrow as a table to be prepared: one float for each row and column, NaN where there is no value.

numbers           as they are
true and false    1 and 0
texts             the numbers of sorted texts, a dictionary of this file's own
dates, times      days since 1970, in fractions
"""

from __future__ import annotations

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
from tutti.data.tables import LIKE, PREPARE, TEXTS
from tutti.errors import BadData, BadOption
from tutti.records.preparation import DATE, EMPTY, FLAG, NUMBER, TEXT, Table, TableColumn

T = TypeVar("T")
R = TypeVar("R")

_CHOICES: Final = {PREPARE: ("auto", "off"), TEXTS: ("auto", "drop")}

MOST_TEXTS: Final = 100_000
"""A column of more different texts, and of fewer than ten rows for each, is left out."""

_ROWS_OF_TEXT: Final = 10

_DAYS: Final = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y")
_FORMS: Final = [day + time for day, time in product(_DAYS, ("", " %H:%M", " %H:%M:%S"))]
"""Dates in texts, besides those of ISO 8601; they have years of four digits."""

_NUMBER: Final = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"

_NEARLY_ALL: Final = 0.9
"""Texts are mistakes in a column of numbers, if this share of its values are numbers ..."""

_FEW: Final = 5
"""... and at most so many texts differ."""

_CODES: Final = 30
"""Up to this many different whole numbers, with some texts among them, are names of something."""

_DAY_US: Final = 86_400e6

_BLOCK: Final = 1 << 16
"""Rows that are copied at once, so that they stay in the cache while all columns are written."""


def is_prepared(options: Mapping[str, Any]) -> bool:
    """Return whether a table is to be prepared.

    Raises:
        BadOption: an option has another value than those that there are.
    """
    for name, choices in _CHOICES.items():
        if options.get(name, choices[0]) not in choices:
            raise BadOption(f"--data.{name} is {options[name]!r}; give one of {', '.join(choices)}")
    return bool(options.get(PREPARE, "auto") == "auto")


def can_be_prepared(kind: Any) -> bool:
    """Return whether a type of Arrow is one of plain columns."""
    return _kind(kind) is not None


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
    like = {column.name: column for column in options.get(LIKE, ())}
    chosen = "columns" in options

    def stored(name: str) -> tuple[TableColumn, Any] | str:
        values, wanted = table.column(name), like.get(name)
        if wanted is not None and wanted.kind != EMPTY:
            values = _as_kind(path, values, wanted)
        kind = _kind(values.type)
        if kind == TEXT:
            most = 0 if options.get(TEXTS) == "drop" else MOST_TEXTS
            encoded = _Encoded(path, name, values, plain=wanted is None)
            reason = None if wanted or (chosen and most) else encoded.reason(most)
            return encoded.stored() if reason is None else reason
        if kind == DATE:
            return TableColumn(name, DATE, form=wanted.form if wanted else ""), _days(values)
        return TableColumn(name, str(kind)), _numbers(values)

    every = dict(zip(names, _in_threads(stored, names), strict=True))
    left_out = {name: one for name, one in every.items() if isinstance(one, str)}
    found = [one for one in every.values() if not isinstance(one, str)]
    matrix = np.empty((table.num_rows, len(found)), float_dtype())

    def write(start: int) -> None:
        for at, (_, values) in enumerate(found):
            place = start
            for chunk in _chunks(values, start, start + _BLOCK):
                matrix[place : place + len(chunk), at] = as_floats(chunk)
                place += len(chunk)

    _in_threads(write, range(0, len(matrix), _BLOCK))
    return matrix, Table(tuple(column for column, _ in found), left_out, chosen)


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


def _kind(kind: Any) -> str | None:
    """Return the kind of a type of Arrow."""
    import pyarrow

    types = pyarrow.types
    tests: dict[str, Sequence[Callable[[Any], bool]]] = {
        FLAG: (types.is_boolean,),
        NUMBER: (types.is_integer, types.is_floating, types.is_decimal, types.is_time, types.is_duration),
        TEXT: (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary),
        DATE: (types.is_date, types.is_timestamp),
        EMPTY: (types.is_null,),
    }
    return next((name for name, some in tests.items() if any(test(kind) for test in some)), None)


def _numbers(values: Any) -> Any:
    """Return a column as one of plain numbers."""
    import pyarrow

    types = pyarrow.types
    if types.is_time(values.type) or types.is_duration(values.type):
        values = values.cast(pyarrow.int64() if values.type.bit_width == 64 else pyarrow.int32())
    elif types.is_decimal(values.type) or types.is_boolean(values.type) or types.is_null(values.type):
        values = values.cast(pyarrow.float64())
    return values


def _days(values: Any) -> Array:
    import pyarrow

    if pyarrow.types.is_date32(values.type):
        return as_array(values.cast(pyarrow.int32()))
    return as_array(values.cast(pyarrow.timestamp("us"), safe=False).cast(pyarrow.int64())) / _DAY_US


def _as_kind(path: Path, values: Any, wanted: TableColumn) -> Any:
    """Return a column in the kind of another table's."""
    import pyarrow

    found = _kind(values.type)
    if found == wanted.kind or (found, wanted.kind) == (FLAG, NUMBER):
        return values
    if pyarrow.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    types = {TEXT: pyarrow.string(), NUMBER: pyarrow.float64(), FLAG: pyarrow.bool_()}
    try:
        if wanted.kind != DATE:
            return values.cast(types[wanted.kind])
        if found == EMPTY:
            return values.cast(pyarrow.timestamp("us"))
        if found == TEXT:
            return _parsed(pyarrow.compute.utf8_trim_whitespace(values), wanted.form)
    except pyarrow.ArrowException as error:
        reason = f": {str(error)[:100]}"
    else:
        reason = ""
    raise BadData(
        f"{path} has values of type {values.type} in the column '{wanted.name}', and those of the training "
        f"are of the kind {wanted.kind}{reason}; give these"
    )


def _parsed(texts: Any, form: str) -> Any:
    """Return texts as timestamps; raise ArrowInvalid if one is none of the form."""
    import pyarrow
    from pyarrow import compute

    if form:
        if not compute.all(compute.match_substring_regex(texts, r"\d{4}")).as_py():
            raise pyarrow.ArrowInvalid("no years of four digits")
        return compute.strptime(texts, format=form, unit="us")
    try:
        return texts.cast(pyarrow.timestamp("us"))
    except pyarrow.ArrowInvalid:
        return texts.cast(pyarrow.timestamp("us", "UTC"))


class _Encoded:
    """A column of texts as numbers of different texts.

    Args:
        path: of the file, for messages.
        name: of the column.
        values: of Arrow.
        plain: the texts may be dates, or numbers with mistakes.
    """

    def __init__(self, path: Path, name: str, values: Any, plain: bool) -> None:
        import pyarrow

        self._path, self._name, self._plain = path, name, plain
        plain_texts = not pyarrow.types.is_dictionary(values.type)
        encoded = values.dictionary_encode() if plain_texts else values
        encoded = encoded.combine_chunks()
        if isinstance(encoded, pyarrow.ChunkedArray):  # of no rows
            encoded = encoded.chunk(0)
        self._numbers: Array = _plain(encoded.indices.fill_null(-1))
        self._texts = pyarrow.compute.utf8_trim_whitespace(encoded.dictionary.cast(pyarrow.string()))
        self._plain = plain and plain_texts
        self._form = self._date_form() if self._plain and len(self._texts) else None

    def reason(self, most: int) -> str | None:
        """Return why the column is left out, if it is: it has more texts than the most that are kept."""
        if not len(self._texts) or self._form is not None:
            return None
        if not most:
            return "texts"
        many = len(self._texts) > max(most, len(self._numbers) // _ROWS_OF_TEXT)
        return f"{len(self._texts):,} texts" if many else None

    def stored(self) -> tuple[TableColumn, Array]:
        """Return the column, and its values as floats."""
        import pyarrow

        if not len(self._texts) and self._plain:
            return TableColumn(self._name, EMPTY), np.full(len(self._numbers), np.nan)
        if self._form is not None:
            known = _days(pyarrow.chunked_array([_parsed(self._texts, self._form)]))
            return TableColumn(self._name, DATE, form=self._form), self._looked_up(known)
        if self._plain:
            self._refuse_mistakes()
        texts = self._texts.to_pylist()
        different = sorted({*texts})
        numbers = {text: number for number, text in enumerate(different)}
        known = np.array([numbers[text] for text in texts], dtype=float_dtype())
        return TableColumn(self._name, TEXT, tuple(different)), self._looked_up(known)

    def _looked_up(self, known: Array) -> Array:
        found: Array = np.append(as_floats(known), float_dtype().type(np.nan))[self._numbers]
        return found

    def _date_form(self) -> str | None:
        """Return the only form of dates in which all texts are; None: they are no dates, or of several."""
        import pyarrow

        forms = ["", *_FORMS]
        for texts in (self._texts.slice(0, 100), self._texts):
            fitting = []
            for form in forms:
                with suppress(pyarrow.ArrowInvalid):
                    _parsed(texts, form)
                    fitting.append(form)
            forms = fitting
        return forms[0] if len(forms) == 1 else None

    def _refuse_mistakes(self) -> None:
        """Refuse numbers with a few other texts among them."""
        from pyarrow import compute

        is_number = _plain(compute.match_substring_regex(self._texts, _NUMBER))
        others = int((~is_number).sum())
        if not 0 < others <= _FEW:
            return
        counts = np.bincount(self._numbers[self._numbers >= 0], minlength=len(self._texts))
        share = counts[is_number].sum() / counts.sum()
        numbers = self._texts.filter(is_number)
        whole = compute.all(compute.match_substring_regex(numbers, r"^[+-]?\d+$")).as_py()
        codes = whole and len(numbers) <= min(_CODES, counts[is_number].sum() / 2)
        if share < _NEARLY_ALL or codes:
            return
        row = int(np.isin(self._numbers, np.flatnonzero(~is_number)).argmax())
        second = "; delete it if it is a second line of names" if row == 0 else ""
        raise BadData(
            f"{self._path} has numbers in the column '{self._name}', but in row {row + 1:,} "
            f"'{self._texts[self._numbers[row]].as_py()[:80]}'{second}; mend it, or leave the column out by "
            "--data.columns A,B,..."
        )
