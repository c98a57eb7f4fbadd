"""CSV files: a row for each sample, with numbers and a target. pyarrow reads them."""

from __future__ import annotations

import csv
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.parquet import Table, arrow_package, read_table
from tutti.data.formats.texts import PACKED, open_text, stem_of
from tutti.data.tables import ABSENT, choose, is_number
from tutti.errors import BadData
from tutti.registry import part

_ROWS: Final = 4096
"""Rows that are looked at to decide whether the first line has the names of the columns."""

_SEPARATORS: Final = ",;\t"

_NULLS: Final = sorted({form for text in ABSENT for form in (text, text.upper(), text.title())} | {"NaN"})


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
        separator, names, named = _head(path)
        if not named and target is None and labelled:
            raise BadData(
                f"{path} has no line with the names of its {len(names)} columns: say which column is to be "
                "predicted by its number, --data.target 0 for the first, -1 for the last"
            )
        choice = choose(names, target, columns, str(path), labelled, group)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadData(
                f"{path} has {names.count(twice)} columns called '{twice}'; give them different names"
            )
        # Not as Arrow guesses them: names of classes may look like numbers, and 1 is not 1.0.
        texts = [names[at] for at in (*choice.targets, choice.group) if at is not None]
        found = _read(path, separator, names, named, texts)
        if not found.num_rows:
            raise BadData(f"{path} has no row below its column names; give a row for each sample")
        table = Table.of(path, found)
        contents = read_table(table, target, columns, missing, labelled=labelled, group=group)
        return replace(contents, name=stem_of(path))


def _head(path: Path) -> tuple[str, list[str], bool]:
    """Return a file's separator, the names of its columns, and whether its first line has them.

    Raises:
        BadData: it is empty, or no text.
    """
    with open_text(path) as file:
        first = next(file, "")
        separator = max(_SEPARATORS, key=first.count)
        try:
            rows = [row for row in csv.reader([first, *islice(file, _ROWS)], delimiter=separator) if row]
        except csv.Error as error:
            raise BadData(f"{path} is broken: {error}; mend it") from error
    if not rows:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    names = [name.strip() for name in rows[0]]
    if len(names) > 2 and names == [str(at) for at in range(len(names))]:
        print(
            f"{path}: the first line, 0,1,2{',...' * (len(names) > 3)}, is taken for the names that pandas "
            "gives to columns, and for no sample",
            file=sys.stderr,
        )
        return separator, names, True
    if _are_names(rows[0], rows[1:]):
        return separator, names, True
    return separator, [*map(str, range(len(names)))], False


def _read(path: Path, separator: str, names: list[str], named: bool, texts: list[str]) -> Any:
    """Return the rows of a file as a table of Arrow, in which the columns `texts` were read as texts."""
    from pyarrow import compute
    from pyarrow import csv as arrow_csv

    arrow = arrow_package()
    try:
        found = arrow_csv.read_csv(
            path,
            arrow_csv.ReadOptions(column_names=names, skip_rows_after_names=int(named)),
            arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                null_values=_NULLS,
                strings_can_be_null=True,
                column_types=dict.fromkeys(texts, arrow.string()),
            ),
        )
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise BadData(f"{path} is broken: {str(error)[:200]}; mend it") from error
    for at, field in enumerate(found.schema):
        column = found.column(at)
        if arrow.types.is_null(field.type):
            column = column.cast(arrow.float64())
        elif arrow.types.is_temporal(field.type):
            column = column.cast(arrow.string())
        elif arrow.types.is_string(field.type):
            column = compute.utf8_trim_whitespace(column)
            absent = compute.is_in(compute.utf8_lower(column), value_set=arrow.array(sorted(ABSENT)))
            column = _as_numbers(compute.if_else(absent, None, column))
        else:
            continue
        found = found.set_column(at, field.name, column)
    return found


def _as_numbers(column: Any) -> Any:
    """Return a column of texts as whole numbers, if all are such, else as numbers, else as it is."""
    arrow = arrow_package()
    for kind in (arrow.int64(), arrow.float64()):
        with suppress(arrow.ArrowInvalid):
            return column.cast(kind)
    return column


def _are_names(first: list[str], rows: list[list[str]]) -> bool:
    """Return whether the first line has the names of the columns, and is no row like those that follow.

    A text above numbers is a name. So is a text above texts, unless one of the line's texts is met again.
    """
    again = False
    texts = [at for at, cell in enumerate(first) if not is_number(cell)]
    for at in texts:
        below = {row[at] for row in rows if at < len(row)}
        if all(map(is_number, below)):
            return True
        again = again or first[at] in below
    return bool(texts) and not again
