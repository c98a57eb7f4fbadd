"""CSV files: a row for each sample, with numbers and a target."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from tutti.data.arrays import as_floats
from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.texts import MOST_LETTERS, PACKED, lines_of, open_text, refuse_longer, stem_of
from tutti.data.pile import Pile
from tutti.data.rows import Array, chosen
from tutti.data.tables import ABSENT, Choice, Texts, choose, groups_of, targets_of
from tutti.errors import BadData
from tutti.registry import part

_ROWS: Final = 4096
"""Rows whose texts are in memory at a time."""

_MOST_NAMED: Final = 12
"""The most columns that an error lists for the user to paste."""

_SEPARATORS: Final = ",;\t"


@part("CSV")
class Csv(Format):
    """CSV files: a row for each sample; `--data.target` names the column to be predicted."""

    endings = tuple(f".{form}{packed}" for form in ("csv", "tsv") for packed in PACKED)

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
            target: the column to be predicted, or several.
            columns: those to predict it from; None: all others.
            missing: "drop" leaves out rows without a target.
            labelled: whether there must be a target.
            group: the column by which samples are grouped, which is no input.

        Raises:
            BadData: the file is broken, or there is a text where a number is due.
        """
        with open_text(path) as file:
            return _read(_table(path, file), target, columns, missing, labelled, group)


@dataclass(frozen=True)
class _Table:
    """The table in a file.

    Attributes:
        path: of the file.
        names: of its columns; their numbers, if the file has no line with names.
        named: the file has such a line.
        rows: all others.
    """

    path: Path
    names: list[str]
    named: bool
    rows: Iterator[list[str]]


def _table(path: Path, file: TextIO) -> _Table:
    """Return the table in a file, and decide whether its first line has the names of the columns.

    Raises:
        BadData: it is empty.
    """
    rows = _rows_of(path, file)
    first = next(rows, None)
    if first is None:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    block = list(islice(rows, _ROWS))
    if _are_positions(first):
        shown = f"0,1,2{',...' * (len(first) > 3)}"
        print(
            f"{path}: the first line, {shown}, is taken for the names that pandas gives to columns, and for "
            "no sample",
            file=sys.stderr,
        )
    elif not _are_names(first, block):
        return _Table(path, [*map(str, range(len(first)))], False, chain([first], block, rows))
    return _Table(path, [name.strip() for name in first], True, chain(block, rows))


def _rows_of(path: Path, file: TextIO) -> Iterator[list[str]]:
    """Return the rows of a file without those that are blank."""
    lines, letters = lines_of(file, path), 0
    first = next(lines, "")

    def counted() -> Iterator[str]:
        # A quoted text may have lines, so a row may have any number of them.
        nonlocal letters
        for line in chain([first], lines):
            letters += len(line)
            if letters > MOST_LETTERS:
                raise refuse_longer(path)
            yield line

    reader = csv.reader(counted(), delimiter=max(_SEPARATORS, key=first.count), strict=True)
    try:
        for row in reader:
            letters = 0
            if row:
                yield row
    except csv.Error as error:
        raise BadData(f"{path} is broken at line {reader.line_num:,}: {error}; mend that line") from error


def _read(
    table: _Table, target: object, columns: object, missing: str, labelled: bool, group: object
) -> Contents[object]:
    path, names = table.path, table.names
    if not table.named and target is None and labelled:
        raise BadData(
            f"{path} has no line with the names of its {len(names)} columns: say which column is to be "
            "predicted by its number, --data.target 0 for the first, -1 for the last"
        )
    choice = choose(names, target, columns, str(path), labelled, group)
    pile, texts = _numbers(table, choice)
    if not len(pile):
        raise BadData(f"{path} has no row below its column names; give a row for each sample")
    used = tuple(names[at] for at in choice.inputs)
    if not labelled:
        return Contents(stem_of(path), {"train": (pile.rows(), None)}, columns=used)
    targets, kept = targets_of([texts[at].column() for at in choice.targets], missing, str(path))
    groups = None if choice.group is None else groups_of(texts[choice.group].column(), kept, str(path))
    inputs = chosen(pile.rows(), np.flatnonzero(kept))
    return Contents(stem_of(path), {"train": (inputs, targets)}, columns=used, groups=groups)


def _numbers(table: _Table, choice: Choice) -> tuple[Pile, dict[int, Texts]]:
    """Return the inputs, and the columns of targets and groups by their positions."""
    path, names, rows = table.path, table.names, table.rows
    width, pick, done = len(names), itemgetter(*choice.inputs), 0
    pile = Pile(path)
    read = choice.targets if choice.group is None else (*choice.targets, choice.group)
    texts = {at: Texts(names[at], str(path)) for at in read}
    many = len(choice.inputs) > 1
    while block := list(islice(rows, _ROWS)):
        for number, row in enumerate(block, done + 1):
            if len(row) != width:
                raise BadData(
                    f"{path} has {len(row)} values in row {number:,}, where its first row has {width}; "
                    "mend that row"
                )
        for at, column in texts.items():
            column.add([row[at] for row in block])
        cells = list(chain.from_iterable(map(pick, block)) if many else map(pick, block))
        try:
            values: Array = np.fromiter(map(float, cells), np.float64, len(cells))
        except ValueError:
            values = np.fromiter(
                (_number(path, cells, names, choice, done, at) for at in range(len(cells))),
                np.float64,
                len(cells),
            )
        pile.add(as_floats(values).reshape(len(block), -1))
        done += len(block)
    return pile, texts


def _number(path: Path, cells: list[str], names: list[str], choice: Choice, done: int, at: int) -> float:
    """Return one of the cells of some rows as a number; NaN: it is missing."""
    try:
        return float(cells[at])
    except ValueError:
        if cells[at].strip().lower() in ABSENT:
            return float("nan")
    inputs = [names[column] for column in choice.inputs]
    row, column = divmod(at, len(inputs))
    beside = cells[row * len(inputs) : (row + 1) * len(inputs)]
    numbers = [name for name, text in zip(inputs, beside, strict=True) if _is_number(text)]
    few = ",".join(numbers) if 0 < len(numbers) <= _MOST_NAMED else "A,B,..."
    raise BadData(
        f"{path} has a text where a number is due: row {done + row + 1:,}, column '{inputs[column]}' has "
        f"'{cells[at][:80]}'; mend it, or leave out the columns that are no numbers: --data.columns {few}"
    )


def _are_names(first: list[str], rows: list[list[str]]) -> bool:
    """Return whether the first line has the names of the columns, and is no row like those that follow.

    A text above numbers is a name. So is a text above texts, unless one of the line's texts is met again.
    """
    again = False
    texts = [at for at, cell in enumerate(first) if not _is_number(cell)]
    for at in texts:
        below = {row[at] for row in rows if at < len(row)}
        if all(map(_is_number, below)):
            return True
        again = again or first[at] in below
    return bool(texts) and not again


def _are_positions(first: list[str]) -> bool:
    return len(first) > 2 and first == [str(at) for at in range(len(first))]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip().lower() in ABSENT
    return True
