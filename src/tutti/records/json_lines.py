"""Files of JSON lines: one object a line, appended as a run goes on. Needs neither torch nor MPI.

JSON knows no NaN and no infinity: these are written as the strings "NaN", "Infinity" and "-Infinity" and read
back as numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, Final, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from tutti.errors import BadRunFolder
from tutti.records.plain_files import plain_file
from tutti.records.untrusted import parse_json, read_file, read_tail

Json = dict[str, Any]
"""A JSON object."""

LARGEST: Final = 1 << 53
"""The largest whole number that all readers of JSON agree on; no record has a larger one."""

T = TypeVar("T")

_TAIL = 1 << 20
"""Bytes at the end of a file that are searched for its last record."""


@dataclass(frozen=True)
class Record:
    """A dataclass that is written as JSON values by `to_json`, and read again by `decode`."""

    def check(self) -> None:
        """Raise ValueError for values that it cannot have, whatever their types allow."""
        return


@dataclass(frozen=True)
class JsonLinesFile(Generic[T]):
    """The content of a file of JSON lines.

    Attributes:
        records: those that could be read, in order.
        damage: one sentence for each line that could not be read, such as one that was cut off by a crash.
    """

    records: list[T]
    damage: list[str]


def to_json(values: object, indent: int | None = None) -> str:
    """Return JSON values or a dataclass as JSON; numbers that JSON does not know become strings."""
    try:
        if indent is None:
            return _encode(values)
        return json.dumps(values, indent=indent, default=_fields_of, allow_nan=False, ensure_ascii=False)
    except ValueError:  # there are such numbers
        return json.dumps(_writable(values), indent=indent, allow_nan=False, ensure_ascii=False)


def to_json_lines(values: object) -> str:
    """Return an object as `to_json` does, each of its fields on a line of its own, for people to read."""
    fields = _fields_of(values) if is_dataclass(values) else cast("Json", values)
    lines = ",\n".join(f"  {json.dumps(name)}: {to_json(value)}" for name, value in fields.items())
    return f"{{\n{lines}\n}}\n"


def _fields_of(value: object) -> Json:
    if not is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
    return vars(value)


# `json.dumps` makes an encoder each time, which takes longer than most values.
_encode: Final = json.JSONEncoder(default=_fields_of, allow_nan=False, ensure_ascii=False).encode


def decode(kind: type[T], values: object) -> T:
    """Make what JSON values stand for, each converted to the type of its field.

    Args:
        kind: a dataclass of numbers, texts, other dataclasses, and lists, tuples, dicts and options of these;
            or a type such as `Json`.
        values: by field; further ones are left out, and missing ones take their defaults.

    Raises:
        TypeError, ValueError, OverflowError: a field without default is missing, or a value is not what its
            field holds.
    """
    return cast("T", _reader(cast("Any", kind))(values))


def parse_record(text: bytes | str, kind: type[T]) -> T:
    """Parse a JSON text by `decode`.

    Raises:
        ValueError: it is no JSON, or no such record.
    """
    try:
        return decode(kind, parse_json(text))
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_record(path: Path, kind: type[T]) -> T:
    """Read a file that holds one record.

    Raises:
        BadRunFolder: it cannot be read, or holds something else.
    """
    try:
        return parse_record(read_file(path), kind)
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}; give the folder of a run") from error
    except ValueError as error:
        raise BadRunFolder(f"{path} is not what tutti wrote ({error}); make it anew") from error


def append_line(path: Path, record: Record, flush: bool = True) -> None:
    """Append `record` to a file of JSON lines; if `flush` it is on the disk when this returns.

    A line that an earlier run left unfinished is ended first, so that it costs only itself.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "a+b", opener=plain_file) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        # A message may have a file name in it that is no text.
        file.write(to_json(record).encode(errors="backslashreplace") + b"\n")
        if flush:
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path, kind: type[T]) -> JsonLinesFile[T]:
    """Read a file of JSON lines; lines that cannot be read are left out and reported in `damage`.

    Raises:
        BadRunFolder: the file cannot be opened.
    """
    try:
        lines = read_file(path).split(b"\n")
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}; give the folder of a run") from error
    found: JsonLinesFile[T] = JsonLinesFile([], [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.records.append(parse_record(line, kind))
        except ValueError as error:
            what = "is cut off" if number == len(lines) else f"is no record ({error})"
            found.damage.append(f"line {number} of {path} {what}; it was left out")
    return found


def last_record(path: Path, kind: type[T]) -> T | None:
    """Read the last whole record of a file of JSON lines from its end; None if it has none.

    Raises:
        OSError: the file cannot be read.
    """
    for line in reversed(read_tail(path, _TAIL).split(b"\n")):
        with suppress(ValueError):  # empty, cut off, or no record
            return parse_record(line, kind)
    return None


def _writable(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if is_dataclass(value):
        return {name: _writable(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return {name: _writable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return what converts a value to a field's type; `T | None` is the only union that records use."""
    within, outer = get_args(hint), get_origin(hint)
    if hint is Any:
        return lambda value: value
    if NoneType in within:
        some = _reader(next(one for one in within if one is not NoneType))
        return lambda value: None if value is None else some(value)
    if outer in (list, tuple):
        return partial(_read_items, outer, _reader(within[0]))
    if outer is dict:
        return partial(_read_pairs, _reader(within[0]), _reader(within[1]))
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(_read_fields, hint, {name: _reader(one) for name, one in get_type_hints(hint).items()})
    return _read_int if hint is int else cast("Callable[[Any], Any]", hint)


def _read_items(kind: Callable[[Iterator[Any]], Any], item: Callable[[Any], Any], value: Any) -> Any:
    _expect(list, value)
    return kind(map(item, value))


def _read_pairs(name: Callable[[Any], Any], item: Callable[[Any], Any], value: Any) -> Any:
    _expect(dict, value)
    return {name(key): item(one) for key, one in value.items()}


def _read_fields(kind: type, fields: Mapping[str, Callable[[Any], Any]], value: Any) -> Any:
    _expect(dict, value)
    made = kind(**{name: read(value[name]) for name, read in fields.items() if name in value})
    if isinstance(made, Record):
        made.check()
    return made


def _read_int(value: Any) -> int:
    made = int(value)
    if abs(made) > LARGEST:
        raise ValueError(f"{str(made)[:20]}... is larger than any number of a record")
    return made


def _expect(kind: type, value: object) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} is expected")
