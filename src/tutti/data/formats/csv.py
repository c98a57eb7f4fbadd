"""CSV files: a row for each sample, with numbers and a target. pyarrow reads them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_tables import TABLE_OPTIONS, arrow_package, read_table
from tutti.data.items import TARGET_WORDS
from tutti.data.tables import ABSENT, choose
from tutti.errors import BadData
from tutti.records.npz import damaged
from tutti.registry import part

PACKED: Final = ("", ".gz", ".zst")
"""The endings of text files after those of their formats."""

_SEPARATORS: Final = ",;\t"

_NULLS: Final = [
    space + text
    for space in ("", " ")
    for text in {form(one) for one in ABSENT for form in (str, str.upper, str.title)} | {"NaN"}
]


@part("CSV")
class Csv(Format):
    """CSV files: a row for each sample; `--data.target` names the column to be predicted."""

    endings = tuple(f".{form}{packed}" for form in ("csv", "tsv") for packed in PACKED)
    options = TABLE_OPTIONS

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        cells, separator = _first_row(path)
        target = options.get("target")
        named = _are_names(cells, target if isinstance(target, list | tuple) else [target])
        names = [name.strip() for name in cells] if named else [str(at) for at in range(len(cells))]
        if not named and target is None and labelled:
            raise BadData(
                f"{path} has no line with the names of its {len(names)} columns: say which column is to be "
                "predicted by its number, --data.target 0 for the first, -1 for the last"
            )
        choice = choose(names, options, str(path), labelled)
        # Not as Arrow guesses them: names of classes may look like dates, and 1 is not 1.0.
        texts = [name for name in (*choice.targets, choice.group) if name is not None]
        table = _read(path, separator, names, named, texts)
        return read_table(path, table.schema, table.select, options, labelled)


def _first_row(path: Path) -> tuple[list[str], str]:
    """Return the cells of a file's first row, and what separates them."""
    try:
        with io.TextIOWrapper(
            arrow_package().input_stream(str(path)), encoding="utf-8-sig", newline=""
        ) as file:
            line = next((line for line in file if line.strip()), "")
            separator = max(_SEPARATORS, key=line.count)
            cells = next(csv.reader([line], delimiter=separator), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadData(f"{path} is broken: {error}; save it as a table in UTF-8") from error
    except OSError as error:
        raise damaged(path, error) from error
    if not cells:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    return cells, separator


def _are_names(cells: list[str], targets: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether the first row has the names of the columns.

    It has if none of its cells is a number, if one is the target's name, or if they count from 0, as pandas
    names columns.
    """
    words = [cell.strip() for cell in cells]
    counted = len(words) > 2 and words == [str(at) for at in range(len(words))]
    targeted = any(
        word.lower() in TARGET_WORDS or (word in targets and not _is_float(word)) for word in words
    )
    return counted or targeted or not any(map(_is_float, words))


def _is_float(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _read(path: Path, separator: str, names: list[str], named: bool, texts: list[str]) -> Any:
    """Return the rows of a file as a table of Arrow."""
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
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise BadData(f"{path} is broken: {str(error)[:200]}; mend it") from error
    for at, field in enumerate(found.schema):
        if field.name in texts:
            column = _as_numbers(compute.utf8_trim_whitespace(found.column(at)))
            found = found.set_column(at, field.name, column)
    return found


def _as_numbers(column: Any) -> Any:
    """Return a column of texts as whole numbers, if all are such, else as numbers, else as it is.

    Codes such as 007 are texts: they are others than 7.
    """
    arrow = arrow_package()
    if arrow.compute.any(arrow.compute.match_substring_regex(column, r"^[+-]?0\d")).as_py():
        return column
    for kind in (arrow.int64(), arrow.float64()):
        with suppress(arrow.ArrowInvalid):
            return column.cast(kind)
    return column
