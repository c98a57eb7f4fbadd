"""JSON files: an object for each sample, one a line or in a list. pyarrow reads them.

Source: https://jsonlines.org, and RFC 8259 for JSON itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_tables import arrow_package, read_table, table_of
from tutti.data.schemas import JSON
from tutti.data.tables import TABLE_OPTIONS
from tutti.errors import BadData
from tutti.records.texts import printable
from tutti.registry import part


@part("JSON lines")
class JsonLines(Format):
    """JSON lines: an object for each sample, whose keys are the columns; or a list of such objects."""

    endings = JSON
    options = TABLE_OPTIONS

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        from pyarrow import json as arrow_json

        arrow = arrow_package()
        try:
            with arrow.input_stream(str(path)) as file:
                start = file.read(64).lstrip()
                if start.startswith(b"["):
                    table = table_of(path, json.loads(start + file.read()))
                else:
                    table = arrow_json.read_json(path)
        except (
            arrow.ArrowException,
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise BadData(
                f"{path} is broken: {printable(str(error)[:200])}; give an object for each sample, such as "
                '{"x": [0.5, 2], "y": 1}, one a line or in a list, with one kind of value for each key'
            ) from error
        return read_table(path, table.schema, table.select, options, labelled)
