"""JSON files: an object for each sample, one a line or in a list.

Source: https://jsonlines.org, and RFC 8259 for JSON itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.parquet import Table, arrow_package, column_of, read_table
from tutti.data.formats.texts import PACKED, open_text, stem_of
from tutti.errors import BadData
from tutti.records.untrusted import printable
from tutti.registry import part

_LIST: Final = tuple(f".json{packed}" for packed in PACKED)
"""The endings of files that are a list of samples, if they begin like one."""

_BLANK: Final = " \t\r\n"

_BLOCK_VALUES: Final = 1 << 18
"""Numbers that are Python objects before they become arrays."""


@part("JSON lines")
class JsonLines(Format):
    """JSON lines: an object for each sample, whose keys are the columns; or a list of such objects."""

    endings = tuple(f".{form}{packed}" for form in ("jsonl", "ndjson", "json") for packed in PACKED)

    @staticmethod
    def read(
        path: Path,
        target: object = None,
        columns: object = None,
        missing: str = "error",
        labelled: bool = True,
        group: object = None,
    ) -> Contents[object]:
        """Read a table.

        Args:
            path: of the file.
            target: the key of what is to be predicted, or several.
            columns: those to predict it from: numbers, or lists of them; None: all others.
            missing: "drop" leaves out samples without a target.
            labelled: whether there must be a target.
            group: the key by which samples are grouped, which is no input.

        Raises:
            BadData: the file is broken, or there is a text where a number is due.
        """
        with open_text(path) as file:
            table = Table.of(path, arrow_table(path, _samples(file, path)))
        contents = read_table(table, target, columns, missing, labelled=labelled, group=group)
        return replace(contents, name=stem_of(path))


def arrow_table(path: Path, samples: Iterable[tuple[str, Mapping[str, object]]]) -> Any:
    """Return samples as a table of Arrow.

    Args:
        path: the file that has them, for messages.
        samples: the place of each, such as "line 3", and its values by name: numbers, texts, lists, arrays.

    Raises:
        BadData: there is none, or the values of one name are of several kinds.
    """
    arrow = arrow_package()
    blocks: list[Any] = []
    waiting: list[Mapping[str, object]] = []
    size, last = 0, ""
    for last, sample in samples:
        waiting.append(sample)
        size += sum(map(_size, sample.values()))
        if size >= _BLOCK_VALUES:
            blocks.append(_block(path, last, waiting))
            waiting, size = [], 0
    if waiting:
        blocks.append(_block(path, last, waiting))
    if not blocks:
        raise BadData(f"{path} has no samples; give at least two")
    try:
        return arrow.concat_tables(blocks, promote_options="permissive")
    except arrow.ArrowException as error:
        raise BadData(f"{path} has values of several kinds: {error}; give one kind for each name") from error


def _block(path: Path, last: str, samples: Sequence[Mapping[str, object]]) -> Any:
    """Return some samples, of which the last is in a place, as a table of Arrow."""
    arrow = arrow_package()
    columns = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        try:
            columns[name] = _column([sample.get(name) for sample in samples])
        except (arrow.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise BadData(
                f"{path} has values of several kinds, or a number that is too large, in '{printable(name)}' "
                f"up to {last}: {printable(str(error)[:200])}; mend it"
            ) from error
    return arrow.table(columns)


def _column(values: list[Any]) -> Any:
    """Return the values of one name: as Python has them, or arrays, of which some may be missing."""
    arrow = arrow_package()
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if not arrays:
        return arrow.array(values)
    starts = np.cumsum([0] + [0 if value is None else len(value) for value in values]).tolist()
    offsets = [None if value is None else start for value, start in zip(values, starts, strict=False)]
    return arrow.LargeListArray.from_arrays(
        arrow.array([*offsets, starts[-1]], arrow.int64()), column_of(np.concatenate(arrays))
    )


def _size(value: object) -> int:
    """Return about how many numbers a value has."""
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) * _size(value[0]) if isinstance(value, list) and value else 1


def _samples(file: TextIO, path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the samples in a file with their places; the values of a list are named by their positions."""
    for where, value in _values(file, path):
        if isinstance(value, list):
            value = {str(at): one for at, one in enumerate(value)}
        if not isinstance(value, dict) or not value:
            raise BadData(
                f"{path} has no object in {where}, but {printable(str(value)[:60])}; give one for "
                'each sample, such as {"x": [0.5, 2], "y": 1}'
            )
        yield where, value


def _values(file: TextIO, path: Path) -> Iterator[tuple[str, object]]:
    """Yield the values in a file with their places: of each line, or of the list that is a file's content."""
    listed = path.name.lower().endswith(_LIST)
    for number, line in enumerate(file, 1):
        text = line.strip(_BLANK)
        if not text:
            continue
        if text.startswith("[") and listed:
            samples = _parsed(line + file.read(), path, "its list")
            yield from ((f"object {at:,}", one) for at, one in enumerate(samples, 1))
            return
        yield f"line {number:,}", _parsed(text, path, f"line {number:,}")


def _parsed(text: str, path: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it has too many levels" if isinstance(error, RecursionError) else str(error)[:200]
        raise BadData(f"{path} is broken in {where}: {printable(reason)}; mend it or leave it out") from error
