"""WebDataset tars: the files of a sample follow each other, and share their name up to the first dot.

Source: https://github.com/webdataset/webdataset, "The WebDataset Format". Nothing is unpacked to the disk.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.arrow_tables import read_table, table_of
from tutti.data.pictures import ENDINGS, Pictures, stamp
from tutti.data.tables import TABLE_OPTIONS
from tutti.errors import BadData
from tutti.records.npz import damaged, open_data_file
from tutti.records.texts import printable
from tutti.registry import part

_VALUES: Final = ("json", "cls", "txt")
"""The ends of the names of files with numbers and texts."""


@part("WebDataset")
class WebDataset(Format):
    """WebDataset tars: 1.jpg, 1.cls, 2.jpg, 2.cls, ...; also .png, .json and .txt."""

    endings = (".tar",)
    options = (*TABLE_OPTIONS, "size")

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        """Read an archive. Its columns are the endings of its files, and the keys in .json files.

        The inputs are the pictures of the samples, or all other columns if they have none.
        """
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        values: dict[str, dict[str, object]] = {}
        try:
            with open_data_file(path) as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
                for entry in archive:
                    folder, _, name = entry.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    if not entry.isfile() or not stem:
                        continue
                    key = printable(f"{folder}/{stem}" if folder else stem)
                    if ending in samples.setdefault(key, {}):
                        raise BadData(f"{path} has the file '{printable(entry.name)}' twice; leave one out")
                    samples[key][ending] = entry.offset_data, entry.size
                    kind = ending.lower().rpartition(".")[2]
                    if kind in _VALUES:
                        content = os.pread(raw.fileno(), entry.size, entry.offset_data)
                        decoded = _value(path, printable(entry.name), kind, content)
                        named = decoded if isinstance(decoded, dict) else {ending: decoded}
                        values.setdefault(key, {}).update(named)
                if not os.pread(raw.fileno(), 1, archive.offset):
                    raise EOFError("it lacks its end mark")
        except (tarfile.TarError, EOFError, OSError, ValueError, MemoryError) as error:
            raise damaged(path, error) from error
        if not samples:
            raise BadData(f"{path} has no files; give some such as 1.png and 1.cls")
        shown = [one for one in next(iter(samples.values())) if one.lower().rpartition(".")[2] in ENDINGS]
        columns = options.get("columns") or shown or None
        (only, *others) = columns if isinstance(columns, list) else [columns]
        pictures = _pictures(path, samples, only) if only in shown and not others else None
        table = table_of(path, [{**values.get(key, {}), **dict.fromkeys(shown, b"")} for key in samples])
        options = {**options, "columns": columns}
        return read_table(path, table.schema, table.select, options, labelled, pictures)


def _pictures(path: Path, samples: Mapping[str, Mapping[str, tuple[int, int]]], ending: str) -> Pictures:
    lacking = next((key for key, files in samples.items() if ending not in files), None)
    if lacking is not None:
        raise BadData(f"{path} has no file '{ending}' in sample '{lacking}'; add it")
    places = [files[ending] for files in samples.values()]

    def content(number: int) -> bytes:
        offset, size = places[number]
        with open_data_file(path) as file:
            return os.pread(file.fileno(), size, offset)

    return Pictures(path, [stamp(path), ending], [f"{key}.{ending}" for key in samples], content)


def _value(path: Path, name: str, kind: str, content: bytes) -> Any:
    try:
        if kind == "json":
            return json.loads(content)
        text = content.decode().strip()
    except (ValueError, RecursionError) as error:
        raise BadData(
            f"{path} is broken in its file '{name}': {printable(str(error)[:200])}; fix it or leave its "
            "sample out"
        ) from error
    whole = kind == "cls" and text.removeprefix("-").isdecimal() and len(text) < 19
    return int(text) if whole else text
