"""CSV files: a row for each sample, with numbers and a target. pyarrow reads them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_tables import TABLE_OPTIONS, arrow_package, read_table
from tutti.data.schemas import CSV, csv_header
from tutti.data.tables import ABSENT, choose
from tutti.errors import BadData
from tutti.registry import part

_NULLS: Final = [
    space + text
    for space in ("", " ")
    for text in {form(one) for one in ABSENT for form in (str, str.upper, str.title)} | {"NaN"}
]


@part("CSV")
class Csv(Format):
    """CSV files: a row for each sample; `--data.target` names the column to be predicted."""

    endings = CSV
    options = TABLE_OPTIONS

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        names, named, separator = csv_header(path, options, labelled)
        choice = choose(names, options, str(path), labelled)
        # Not as Arrow guesses them: names of classes may look like dates, and 1 is not 1.0.
        texts = [name for name in (*choice.targets, choice.group) if name is not None]
        table = _read(path, separator, names, named, texts)
        return read_table(path, table.schema, table.select, options, labelled)


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
    """Return a column of texts as whole numbers, if all are such, else as numbers, else as it is."""
    arrow = arrow_package()
    for kind in (arrow.int64(), arrow.float64()):
        with suppress(arrow.ArrowInvalid):
            return column.cast(kind)
    return column
