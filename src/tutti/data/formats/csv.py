"""CSV files: a row for each sample, with numbers and a target. pyarrow reads them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_tables import TABLE_OPTIONS, arrow_package, read_table
from tutti.data.items import TARGET_WORDS
from tutti.data.tables import ABSENT, LIKE, choose
from tutti.errors import BadData
from tutti.records.npz import damaged
from tutti.records.preparation import TEXT
from tutti.registry import part

PACKED: Final = ("", ".gz", ".zst")
"""The endings of text files after those of their formats."""

_SEPARATORS: Final = ",;\t"

_LOOKED_AT: Final = 1000
_CELLS: Final = 100_000
"""The most lines and cells that are looked at before a file is read."""

_COMMA: Final = re.compile(r"\s*[+-]?\d+,\d+\s*")
_POINT: Final = re.compile(r"\s*[+-]?\d+\.\d+\s*")

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
        rows, separator = _first_rows(path)
        cells, target = rows[0], options.get("target")
        named = _are_names(cells, target if isinstance(target, list | tuple) else [target])
        names = [name.strip() for name in cells] if named else [str(at) for at in range(len(cells))]
        if not named and target is None and labelled:
            raise BadData(
                f"{path} has no line with the names of its {len(names)} columns: say which column is to be "
                "predicted by its number, --data.target 0 for the first, -1 for the last"
            )
        choice = choose(names, options, str(path), labelled)
        used = [names.index(name) for name in (*choice.inputs, *choice.targets)]
        cells = [row[at] for row in rows for at in used if at < len(row)]
        arrow, decimal_point = arrow_package(), _decimal_point(path, cells[:_CELLS], separator)
        # Not as Arrow guesses them: names of classes may look like dates, and 1 is not 1.0.
        texts = [name for name in (*choice.targets, choice.group) if name is not None]
        known = [one.name for one in options.get(LIKE, ()) if one.kind == TEXT or one.form]
        convert = {
            "null_values": _NULLS,
            "strings_can_be_null": True,
            "column_types": dict.fromkeys([*texts, *known], arrow.string()),
            "decimal_point": decimal_point,
        }
        table = _read(path, separator, names, named, convert)
        for name in texts:
            column = arrow.compute.utf8_trim_whitespace(table.column(name))
            table = table.set_column(names.index(name), name, _as_numbers(column, decimal_point))
        if any(arrow.types.is_binary(table.schema.field(name).type) for name in choice.inputs):
            raise BadData(_encoding(path))
        return read_table(path, table.schema, table.select, options, labelled)


def _first_rows(path: Path) -> tuple[list[list[str]], str]:
    """Return the cells of a file's first rows, and what separates them."""
    try:
        with io.TextIOWrapper(
            arrow_package().input_stream(str(path)), encoding="utf-8-sig", newline=""
        ) as file:
            lines = list(islice(dropwhile(lambda line: not line.strip(), file), _LOOKED_AT))
            separator = max(_SEPARATORS, key=lines[0].count) if lines else ""
            rows = [row for row in csv.reader(lines, delimiter=separator or ",") if row]
    except UnicodeDecodeError as error:
        raise BadData(_encoding(path)) from error
    except csv.Error as error:
        raise BadData(f"{path} is broken: {error}; save it as a table in UTF-8") from error
    except OSError as error:
        raise damaged(path, error) from error
    if not rows:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    return rows, separator


def _encoding(path: Path) -> str:
    return (
        f"{path} is not in UTF-8; write it so, as from Latin-1 by: iconv -f latin1 -t utf-8 {path.name} > "
        "NEW.csv"
    )


def _decimal_point(path: Path, cells: list[str], separator: str) -> str:
    """Return the decimal point of a file: a comma, if some numbers have one, and none a point."""
    commas = next((cell for cell in cells if _COMMA.fullmatch(cell)), None)
    if commas is None:
        return "."
    points = next((cell for cell in cells if _POINT.fullmatch(cell)), None)
    if separator == "," or points is not None:
        other = "" if points is None else f", and others such as '{points}'"
        raise BadData(
            f"{path} has numbers such as '{commas}'{other}: it is not plain whether the comma is a decimal "
            "point; write numbers as 1234.5"
        )
    return ","


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


def _read(path: Path, separator: str, names: list[str], named: bool, convert: Mapping[str, Any]) -> Any:
    """Return the rows of a file as a table of Arrow."""
    from pyarrow import csv as arrow_csv

    try:
        return arrow_csv.read_csv(
            path,
            arrow_csv.ReadOptions(column_names=names, skip_rows_after_names=int(named)),
            arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            arrow_csv.ConvertOptions(**convert),
        )
    except (arrow_package().ArrowException, UnicodeDecodeError, OSError) as error:
        if "UTF8" in str(error):
            raise BadData(_encoding(path)) from error
        raise BadData(f"{path} is broken: {str(error)[:200]}; mend it") from error


def _as_numbers(column: Any, decimal_point: str) -> Any:
    """Return a column of texts as whole numbers, if all are such, else as numbers, else as it is.

    Codes such as 007 are texts: they are others than 7.
    """
    arrow = arrow_package()
    if arrow.compute.any(arrow.compute.match_substring_regex(column, r"^[+-]?0\d")).as_py():
        return column
    numbers = column if decimal_point == "." else arrow.compute.replace_substring(column, ",", ".")
    for kind in (arrow.int64(), arrow.float64()):
        with suppress(arrow.ArrowInvalid):
            return numbers.cast(kind)
    return column
