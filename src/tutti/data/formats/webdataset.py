"""WebDataset tars: the files of a sample follow each other, and share their name up to the first dot.

Source: https://github.com/webdataset/webdataset, "The WebDataset Format". Nothing is unpacked to the disk.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format, listed
from tutti.data.formats.arrow_tables import TABLE_OPTIONS, arrow_package, read_table
from tutti.data.pictures import ENDINGS, Pictures, stamp
from tutti.data.rows import Array
from tutti.errors import BadData
from tutti.records.npz import damaged, npy_array, open_data_file
from tutti.records.untrusted import printable
from tutti.registry import part

_VALUES: Final = ("npy", "json", "cls", "txt")
"""The ends of the names of files with arrays, numbers and texts."""


@part("WebDataset")
class WebDataset(Format):
    """WebDataset tars: 1.jpg, 1.cls, 2.jpg, 2.cls, ...; also .png, .npy, .json and .txt."""

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
                        found = _value(path, printable(entry.name), kind, content)
                        named = found if isinstance(found, dict) else {ending.removesuffix(".npy"): found}
                        values.setdefault(key, {}).update(named)
                if not os.pread(raw.fileno(), 1, archive.offset):
                    raise EOFError("it lacks its end mark")
        except (tarfile.TarError, EOFError, OSError, ValueError, MemoryError) as error:
            raise damaged(path, error) from error
        if not samples:
            raise BadData(f"{path} has no files; give some such as 1.png and 1.cls")
        columns, pictures = options.get("columns"), None
        shown = _picture(path, next(iter(samples.values())), columns)
        rows = [values.get(key, {}) for key in samples]
        if shown is not None:
            columns = shown
            rows = [{**row, shown: b""} for row in rows]
            pictures = _pictures(path, samples, shown)
        table = _table(path, rows)
        return read_table(
            path, table.schema, table.select, {**options, "columns": columns}, labelled, pictures
        )


def _picture(path: Path, endings: Iterable[str], columns: object) -> str | None:
    """Return the ending of the pictures that are the inputs."""
    pictures = [one for one in endings if one.lower().rpartition(".")[2] in ENDINGS]
    wanted = columns if isinstance(columns, list | tuple) else [columns]
    chosen = pictures if columns is None else [one for one in pictures if one in wanted]
    if len(chosen) > 1 or (columns is not None and chosen and len(wanted) > 1):
        raise BadData(
            f"{path} has samples of {listed(chosen)} and more to predict from; give one kind of pictures "
            f"alone, by --data.columns {chosen[0]}"
        )
    return chosen[0] if chosen else None


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
        if kind == "npy":
            array = npy_array(content)
            return array if array.ndim else array.item()
        if kind == "json":
            return json.loads(content)
        text = content.decode().strip()
    except (ValueError, RecursionError) as error:
        raise BadData(
            f"{path} is broken in its file '{name}': {printable(str(error)[:200])}; mend it or leave its "
            "sample out"
        ) from error
    whole = kind == "cls" and text.removeprefix("-").isdecimal() and len(text) < 19
    return int(text) if whole else text


def _table(path: Path, rows: list[dict[str, Any]]) -> Any:
    """Return samples as a table of Arrow."""
    arrow = arrow_package()
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            arrays = [value for value in values if isinstance(value, np.ndarray)]
            columns[name] = _lists(values, arrays) if arrays else arrow.array(values)
        except (arrow.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise BadData(
                f"{path} has values of several kinds in '{printable(name)}': {printable(str(error)[:200])}"
            ) from error
    return arrow.table(columns)


def _lists(values: list[Any], arrays: list[Array]) -> Any:
    """Return arrays as a column of lists; None stands for a missing one."""
    arrow = arrow_package()
    flat = np.concatenate(arrays)
    numbers = arrow.array(flat.reshape(-1).astype(np.float32 if flat.dtype.kind == "b" else flat.dtype))
    for length in reversed(flat.shape[1:]):
        numbers = arrow.FixedSizeListArray.from_arrays(numbers, length)
    ends = np.cumsum([0] + [0 if value is None else len(value) for value in values]).tolist()
    starts = [None if value is None else start for value, start in zip(values, ends, strict=False)]
    return arrow.LargeListArray.from_arrays(arrow.array([*starts, ends[-1]], arrow.int64()), numbers)
