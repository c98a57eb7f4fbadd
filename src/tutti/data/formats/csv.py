"""CSV files: a row for each sample, with numbers and a target."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from typing_extensions import override

from tutti.data.arrays import as_floats
from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.texts import MOST_LETTERS, PACKED, lines_of, open_text, refuse_longer, stem_of
from tutti.data.pile import Pile
from tutti.data.rows import Array, chosen
from tutti.data.tables import ABSENT, Choice, Column, Texts, choose, groups_of, position_of, targets_of
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
            rows = _rows_of(path, file)
            found = _read(path, rows, target, columns, missing, labelled, group)
        if found is not None:
            return found
        with open_text(path) as file:
            rows = _rows_of(path, file)
            again = _read(path, rows, target, columns, missing, labelled, group, named=False)
        assert again is not None, "all lines are rows"
        return again

    @staticmethod
    @override
    def column(path: Path, name: str) -> Array:
        """Read a column, as texts unless all are numbers."""
        with open_text(path) as file:
            rows = _rows_of(path, file)
            first = next(rows, [])
            names = [one.strip() for one in first] if _are_names(first) else [*map(str, range(len(first)))]
            at = position_of(names, name, str(path))
            found = Texts(names[at], str(path))
            rest = rows if _are_names(first) else chain([first], rows)
            while block := list(islice(rest, _ROWS)):
                found.add([row[at] if at < len(row) else "" for row in block])
        return groups_of(found.column(), str(path))


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
    path: Path,
    rows: Iterator[list[str]],
    target: object,
    columns: object,
    missing: str,
    labelled: bool,
    group: object,
    named: bool = True,
) -> Contents[object] | None:
    """Read a table; None: its first line was taken for names, and turns out to be a row."""
    first = next(rows, None)
    if first is None:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    if not named or not _are_names(first):
        names, rows = [str(at) for at in range(len(first))], chain([first], rows)
        if target is None and labelled:
            raise BadData(
                f"{path} has no line with the names of its {len(names)} columns: say which column is to be "
                "predicted by its number, --data.target 0 for the first, -1 for the last"
            )
    else:
        names = [name.strip() for name in first]
        if _are_positions(first):
            said = "is taken for the names that pandas gives to columns, and for no sample"
            print(f"{path}: the first line, 0,1,2{',...' * (len(first) > 3)}, {said}", file=sys.stderr)
    choice = choose(names, target, columns, str(path), labelled, group)
    pile, goals = _numbers(path, rows, names, choice)
    if not len(pile):
        raise BadData(f"{path} has no row below its column names; give a row for each sample")
    used = tuple(names[at] for at in choice.inputs)
    if not labelled:
        return Contents(stem_of(path), {"train": (pile.rows(), None)}, columns=used)
    found = [goal.column() for goal in goals]
    if named and _is_row(first, choice, found):
        return None
    targets, kept = targets_of(found, missing, str(path))
    inputs = chosen(pile.rows(), np.flatnonzero(kept))
    return Contents(stem_of(path), {"train": (inputs, targets)}, columns=used)


def _numbers(
    path: Path, rows: Iterator[list[str]], names: list[str], choice: Choice
) -> tuple[Pile, list[Texts]]:
    """Return the inputs, and the texts of each target."""
    width, pick, done = len(names), itemgetter(*choice.inputs), 0
    pile = Pile(path)
    goals = [Texts(names[at], str(path)) for at in choice.targets]
    many = len(choice.inputs) > 1
    while block := list(islice(rows, _ROWS)):
        for number, row in enumerate(block, done + 1):
            if len(row) != width:
                raise BadData(
                    f"{path} has {len(row)} values in row {number:,}, where its first row has {width}; "
                    "mend that row"
                )
        for at, goal in zip(choice.targets, goals, strict=True):
            goal.add([row[at] for row in block])
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
    return pile, goals


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


def _are_names(first: list[str]) -> bool:
    """Tell whether the cells of the first line are names of columns.

    They are where one is no number; and 0, 1, 2, ... are those of a frame of pandas that has none.
    """
    return _are_positions(first) or not all(map(_is_number, first))


def _are_positions(first: list[str]) -> bool:
    return len(first) > 2 and first == [str(at) for at in range(len(first))]


def _is_row(first: list[str], choice: Choice, goals: list[Column]) -> bool:
    """Tell whether the first line is a row like the others, whose only text is the name of a class."""
    if len(goals) > 1 or not all(_is_number(first[at]) for at in choice.inputs):
        return False
    return bool(np.isin(first[choice.targets[0]].strip(), goals[0].values))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip().lower() in ABSENT
    return True
