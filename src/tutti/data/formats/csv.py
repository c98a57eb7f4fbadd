"""CSV files: a row for each sample, with numbers and a target."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Final, cast

import numpy as np

from tutti.data.arrays import float_dtype
from tutti.data.contents import Contents
from tutti.data.formats import Format, read_start
from tutti.data.rows import Array, Rows, chosen, joined
from tutti.data.tables import ABSENT, Choice, Column, choose, targets_of
from tutti.errors import BadData
from tutti.records.npz import open_data_file, refuse_larger_than_memory
from tutti.registry import part

_ROWS: Final = 4096
"""Rows whose texts are in memory at a time."""

_SEPARATORS: Final = ",;\t"


@part("CSV")
class Csv(Format):
    """CSV files: a row for each sample; `--data.target` names the column to be predicted."""

    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    @staticmethod
    def read(
        path: Path, target: object = None, columns: object = None, missing: str = "error"
    ) -> Contents[object]:
        """Read a table.

        Args:
            path: of the file.
            target: the column to be predicted, or several.
            columns: those to predict it from; None: all others.
            missing: "drop" leaves out rows without a target.

        Raises:
            BadData: the file is broken, or there is a text where a number is due.
        """
        read_start(path)
        try:
            with ExitStack() as stack:
                return _read(path, _rows_of(path, stack), target, columns, missing)
        except UnicodeDecodeError as error:
            raise BadData(f"{path} is no text in UTF-8: {error.reason}; save it as UTF-8") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadData(f"{path} is truncated or damaged: {error}; copy it again") from error


def _rows_of(path: Path, stack: ExitStack) -> Iterator[list[str]]:
    """Open a file, and return its rows without those that are blank."""
    raw = stack.enter_context(open_data_file(path))
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    unpacked = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=raw))) if packed else raw
    file = stack.enter_context(io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline=""))
    first = file.readline(1 << 20)
    separator = max(_SEPARATORS, key=first.count)
    reader = csv.reader(chain([first], file), delimiter=separator, strict=True)

    def rows() -> Iterator[list[str]]:
        try:
            for row in reader:
                if row:
                    yield row
        except csv.Error as error:
            raise BadData(f"{path} is broken at line {reader.line_num:,}: {error}; mend that line") from error

    return rows()


def _read(
    path: Path, rows: Iterator[list[str]], target: object, columns: object, missing: str
) -> Contents[object]:
    first = next(rows, None)
    if first is None:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    if all(_is_number(cell) for cell in first):
        names, rows = [str(at) for at in range(len(first))], chain([first], rows)
        if target is None:
            raise BadData(
                f"{path} has no line with the names of its {len(names)} columns: say which column is to be "
                "predicted by its number, --data.target 0 for the first, -1 for the last"
            )
    else:
        names = [name.strip() for name in first]
    choice = choose(names, target, columns, str(path))
    pieces, goals = _numbers(path, rows, names, choice)
    if not pieces:
        raise BadData(f"{path} has no row below its column names; give a row for each sample")
    found = [Column.of_texts(names[at], texts) for at, texts in zip(choice.targets, goals, strict=True)]
    targets, kept = targets_of(found, missing, str(path))
    inputs = chosen(joined(pieces), np.flatnonzero(kept))
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    return Contents(stem, {"train": (inputs, targets)}, columns=tuple(names[at] for at in choice.inputs))


def _numbers(
    path: Path, rows: Iterator[list[str]], names: list[str], choice: Choice
) -> tuple[list[Rows], list[list[str]]]:
    """Return the inputs in pieces, and the texts of each target."""
    width, pick, done = len(names), itemgetter(*choice.inputs), 0
    pieces: list[Rows] = []
    goals: list[list[str]] = [[] for _ in choice.targets]
    many = len(choice.inputs) > 1
    while block := list(islice(rows, _ROWS)):
        for number, row in enumerate(block, done + 1):
            if len(row) != width:
                raise BadData(
                    f"{path} has {len(row)} values in row {number:,}, where its first row has {width}; "
                    "mend that row"
                )
        for at, goal in zip(choice.targets, goals, strict=True):
            goal.extend(row[at] for row in block)
        cells = list(chain.from_iterable(map(pick, block)) if many else map(pick, block))
        try:
            values: Array = np.fromiter(map(float, cells), float_dtype(), len(cells))
        except ValueError:
            values = np.fromiter(
                (_number(path, text, names, choice, done, at) for at, text in enumerate(cells)),
                float_dtype(),
                len(cells),
            )
        pieces.append(values.reshape(len(block), -1))
        done += len(block)
        refuse_larger_than_memory(path, done * len(choice.inputs) * values.itemsize)
    return pieces, goals


def _number(path: Path, text: str, names: list[str], choice: Choice, done: int, at: int) -> float:
    """Return a number; NaN: it is missing."""
    try:
        return float(text)
    except ValueError:
        if text.strip().lower() in ABSENT:
            return float("nan")
    row, column = divmod(at, len(choice.inputs))
    name = names[choice.inputs[column]]
    raise BadData(
        f"{path} has a text where a number is due: row {done + row + 1:,}, column '{name}' has "
        f"'{text[:80]}'; mend it, or choose the columns of numbers by --data.columns A,B,..."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip().lower() in ABSENT
    return True
