"""Files of JSON lines: one object a line, appended as a run goes on. Needs neither torch nor MPI.

JSON has no NaN and no infinity: these are written as the strings "NaN", "Infinity" and "-Infinity" and read
back as numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from tutti.errors import BadRunFolder

Json = dict[str, Any]
"""A JSON object."""

T = TypeVar("T")

_TAIL = 1 << 20
"""Bytes at the end of a file that are searched for its last record."""


@dataclass(frozen=True)
class Record:
    """A dataclass that `to_json` writes as JSON values, and `decode` reads."""


@dataclass(frozen=True)
class JsonLinesFile(Generic[T]):
    """The content of a file of JSON lines."""

    records: list[T]  # in order; unreadable ones are left out
    damage: list[str]  # one sentence for each unreadable line, such as one cut off by a crash


def to_json(values: object, indent: int | None = None) -> str:
    """Return JSON values or a dataclass as JSON; numbers that JSON lacks become strings."""
    try:
        return json.dumps(values, indent=indent, default=_fields_of, allow_nan=False, ensure_ascii=False)
    except ValueError:  # there are such numbers
        return json.dumps(_writable(values), indent=indent, allow_nan=False, ensure_ascii=False)


def to_json_lines(values: object) -> str:
    """Return an object like `to_json`, one field a line, for people to read."""
    fields = _fields_of(values) if is_dataclass(values) else cast("Json", values)
    lines = ",\n".join(f"  {json.dumps(name)}: {to_json(value)}" for name, value in fields.items())
    return f"{{\n{lines}\n}}\n"


def _fields_of(value: object) -> Json:
    if not is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
    return vars(value)


def decode(kind: type[T], values: object) -> T:
    """Make a dataclass (or a type such as `Json`) from JSON values, each converted to its field's type.

    Unknown fields are ignored, missing ones take their defaults. TypeError, ValueError, OverflowError: a
    value has another type.
    """
    return cast("T", _decoded(kind, values))


def parse_record(text: bytes | str, kind: type[T]) -> T:
    """Parse a JSON text by `decode`."""
    try:
        return decode(kind, json.loads(text))
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_record(path: Path, kind: type[T]) -> T:
    """Read a file that holds one record."""
    try:
        return parse_record(path.read_bytes(), kind)
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}; give the folder of a run") from error
    except ValueError as error:
        raise BadRunFolder(f"{path} is not what tutti wrote ({error}); make it again") from error


def append_line(path: Path, record: Record, flush: bool = True) -> None:
    """Append `record` to a file of JSON lines; if `flush` it is on the disk when this returns.

    An unfinished line of an earlier run is ended first, so that only that line is lost.
    """
    with open(path, "a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        # A message may name a file whose name is no text.
        file.write(to_json(record).encode(errors="backslashreplace") + b"\n")
        if flush:
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path, kind: type[T]) -> JsonLinesFile[T]:
    """Read a file of JSON lines, if it is there; lines that cannot be read are reported in `damage`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise BadRunFolder(f"cannot read {path}: {error.strerror}; give the folder of a run") from error
    content: JsonLinesFile[T] = JsonLinesFile([], [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content.records.append(parse_record(line, kind))
        except ValueError as error:
            what = "is cut off" if number == len(lines) else f"is no record ({error})"
            content.damage.append(f"line {number} of {path} {what}; it was left out")
    return content


def read_all(paths: Iterable[Path], kind: type[T]) -> JsonLinesFile[T]:
    """Read several files of JSON lines, in the order of the records' `time`."""
    found = [read_lines(path, kind) for path in paths]
    records = sorted((record for lines in found for record in lines.records), key=attrgetter("time"))
    return JsonLinesFile(records, [sentence for lines in found for sentence in lines.damage])


def last_record(path: Path, kind: type[T]) -> T | None:
    """Read the last whole record of a file of JSON lines from its end; None if it has none."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
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


def _decoded(hint: Any, value: Any) -> Any:
    """Convert a value to a field's type; `T | None` is the only union in records."""
    outer, within = _parts(hint)
    if hint is Any:
        return value
    if NoneType in within:
        [some] = [one for one in within if one is not NoneType]
        return None if value is None else _decoded(some, value)
    if outer in (list, tuple):
        return outer(_decoded(within[0], item) for item in _expect(list, value))
    if outer is dict:
        return {
            _decoded(within[0], key): _decoded(within[1], item) for key, item in _expect(dict, value).items()
        }
    if isinstance(hint, type) and is_dataclass(hint):
        fields = _hints(hint)
        items = _expect(dict, value).items()
        return hint(**{name: _decoded(fields[name], item) for name, item in items if name in fields})
    return hint(value)


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _expect(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} is expected")
    return value
