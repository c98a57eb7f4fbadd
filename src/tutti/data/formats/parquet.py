"""Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_tables import arrow_package, read_table
from tutti.data.tables import TABLE_OPTIONS
from tutti.records.npz import damaged
from tutti.registry import part


@part("Parquet")
class Parquet(Format):
    """Parquet files: `--data.target` names the column to predict; pictures are decoded."""

    start = b"PAR1"
    options = (*TABLE_OPTIONS, "size")

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        except (arrow_package().ArrowException, OSError) as error:
            raise damaged(path, error) from error

        def read(names: list[str]) -> Any:
            return file.read(columns=names)

        return read_table(path, file.schema_arrow, read, options, labelled)


@part("Arrow")
class Arrow(Format):
    """Arrow files, also called Feather; like Parquet files."""

    start = b"ARROW1"
    options = Parquet.options

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        arrow = arrow_package()
        try:
            table = arrow.ipc.open_file(arrow.memory_map(str(path))).read_all()
        except (arrow.ArrowException, OSError) as error:
            raise damaged(path, error) from error
        return read_table(path, table.schema, table.select, options, labelled)
