"""CSV files: a row for each sample, with numbers and a target. pyarrow reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_columns import is_prepared
from tutti.data.formats.arrow_tables import arrow_package, read_table
from tutti.data.schemas import CSV, CsvStart, csv_start, not_in_utf8
from tutti.data.tables import ABSENT, LIKE, TABLE_OPTIONS, choose
from tutti.errors import BadData
from tutti.records.preparation import TEXT
from tutti.registry import part

_LARGE: Final = 1 << 22
"""The bytes of a file above which the types of its columns are looked up in its first rows."""

_CELLS: Final = 100_000
"""The most cells that are looked at before a file is read."""

_CODE: Final = re.compile(r"\s*0\d+\s*")
_AMONG_TEXTS: Final = r"^(\s*[+-]?\d+),(\d+\s*%?\s*)$"
_COMMA: Final = re.compile(r"\s*[+-]?\d+,\d+\s*")
_POINT: Final = re.compile(r"\s*[+-]?\d+\.\d+\s*")

NULLS: Final = [
    space + text
    for space in ("", " ")
    for text in {form(one) for one in ABSENT for form in (str, str.upper, str.title)} | {"NaN"}
]


@part("CSV")
class Csv(Format):
    """CSV files: a row for each sample; `--data.target` names the column to predict."""

    endings = CSV
    options = TABLE_OPTIONS

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        start = csv_start(path, options, labelled)
        names = start.names
        choice = choose(names, options, str(path), labelled)
        used = [names.index(name) for name in (*choice.inputs, *choice.targets)]
        cells = [row[at] for row in start.rows for at in used if at < len(row)]
        arrow, decimal_point = arrow_package(), _decimal_point(path, cells[:_CELLS], start.separator)
        # Not as Arrow guesses them: names of classes may look like dates, and 1 is not 1.0.
        texts = [name for name in (*choice.targets, choice.group) if name is not None]
        known = [one.name for one in options.get(LIKE, ()) if one.kind == TEXT or one.form]
        if LIKE not in options and is_prepared(options):
            some = start.rows[int(start.named) : _CELLS // len(names) + 2]
            known += {names[at] for row in some for at in used if at < len(row) and _CODE.fullmatch(row[at])}
        convert = {
            "null_values": NULLS,
            "strings_can_be_null": True,
            "column_types": dict.fromkeys([*texts, *known], arrow.string()),
            "decimal_point": decimal_point,
        }
        table = _read(path, start, convert)
        for name in texts:
            column = arrow.compute.utf8_trim_whitespace(table.column(name))
            table = table.set_column(names.index(name), name, _as_numbers(column, decimal_point))
        for at, name in enumerate(names if decimal_point == "," else []):
            if name in choice.inputs and arrow.types.is_string(table.schema.field(at).type):
                column = arrow.compute.replace_substring_regex(table.column(at), _AMONG_TEXTS, r"\1.\2")
                table = table.set_column(at, name, column)
        if any(arrow.types.is_binary(table.schema.field(name).type) for name in choice.inputs):
            raise BadData(not_in_utf8(path))
        return read_table(path, table.schema, table.select, options, labelled)


def _decimal_point(path: Path, cells: list[str], separator: str) -> str:
    """Return the decimal point of a file: a comma, if some numbers have one and none has a point."""
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


def _read(path: Path, start: CsvStart, convert: Mapping[str, Any]) -> Any:
    """Return the rows of a file as an Arrow table."""
    from pyarrow import csv as arrow_csv

    how = (
        arrow_csv.ReadOptions(column_names=start.names, skip_rows_after_names=int(start.named)),
        arrow_csv.ParseOptions(delimiter=start.separator, newlines_in_values=True),
    )
    try:
        if path.stat().st_size > _LARGE:
            # Where types are known, Arrow forgets the text at once, and takes half the memory and time.
            with arrow_csv.open_csv(path, *how, arrow_csv.ConvertOptions(**convert)) as first:
                types = _types(first.schema)
            typed = {**convert, "column_types": types | convert["column_types"]}
            with suppress(arrow_package().ArrowInvalid):
                return arrow_csv.read_csv(path, *how, arrow_csv.ConvertOptions(**typed))
        return arrow_csv.read_csv(path, *how, arrow_csv.ConvertOptions(**convert))
    except (arrow_package().ArrowException, UnicodeDecodeError, OSError) as error:
        if "UTF8" in str(error):
            raise BadData(not_in_utf8(path)) from error
        raise BadData(f"{path} is broken: {str(error)[:200]}; fix it") from error


def _types(schema: Any) -> dict[str, Any]:
    """Return the types of the first rows' columns, except those that these rows do not reveal."""
    arrow = arrow_package()
    numbers = {field.name: arrow.float64() for field in schema if arrow.types.is_integer(field.type)}
    return {field.name: field.type for field in schema if not arrow.types.is_null(field.type)} | numbers


def _as_numbers(column: Any, decimal_point: str) -> Any:
    """Return a column of texts as whole numbers, or else as numbers, or unchanged if some are not.

    Codes such as 007 stay texts: they differ from 7.
    """
    arrow = arrow_package()
    if arrow.compute.any(arrow.compute.match_substring_regex(column, r"^[+-]?0\d")).as_py():
        return column
    numbers = column if decimal_point == "." else arrow.compute.replace_substring(column, ",", ".")
    for kind in (arrow.int64(), arrow.float64()):
        with suppress(arrow.ArrowInvalid):
            return numbers.cast(kind)
    return column
