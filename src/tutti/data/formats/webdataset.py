"""WebDataset tars: the files of a sample follow each other, and share their name up to the first dot.

Source: https://github.com/webdataset/webdataset, "The WebDataset Format". Nothing is unpacked to the disk.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, cast

from tutti.data.contents import Contents
from tutti.data.formats import Format, listed
from tutti.data.formats.json_lines import arrow_table
from tutti.data.formats.parquet import Table, read_table
from tutti.data.pictures import ENDINGS, Pictures, stamp
from tutti.errors import BadData
from tutti.records.npz import damaged, npy_array, open_data_file
from tutti.records.untrusted import printable
from tutti.registry import part

_END: Final = 1 << 20
"""Bytes after the end mark of an archive that are looked at: they must be 0."""


@part("WebDataset")
class WebDataset(Format):
    """WebDataset tars: 1.jpg, 1.cls, 2.jpg, 2.cls, ...; also .png, .npy, .json and .txt."""

    endings = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")

    @staticmethod
    def read(
        path: Path,
        target: object = None,
        columns: object = None,
        missing: str = "error",
        size: object = None,
        skip_bad: bool = False,
        labelled: bool = True,
        group: object = None,
    ) -> Contents[object]:
        """Read an archive. Its columns are the endings of its files, and the keys in those that end in .json.

        Args:
            path: of the archive.
            target: the column to be predicted, or several; None: "cls", or a key such as "label".
            columns: those to predict it from; None: the picture of a sample, or all others if it has none.
            missing: "drop" leaves out samples without a target.
            size: height and width that pictures are brought to; None: they have one size.
            skip_bad: leave out pictures that cannot be decoded.
            labelled: whether there must be a target.
            group: the column by which samples are grouped, which is no input.

        Raises:
            BadData: it is packed or damaged, has links, or samples that differ.
        """
        if not path.name.lower().endswith(".tar"):
            raise BadData(
                f"{path} is packed, so that no sample can be read without all before it; unpack it to a .tar "
                "by gunzip, unzstd or the like"
            )
        shown: list[_Member] = []
        with open_data_file(path) as file:
            all_samples = groupby(_members(path, file), key=lambda member: member.key)
            both = ((key, _by_ending(path, members)) for key, members in all_samples)
            first = next(both, None)
            if first is None:
                raise BadData(f"{path} has no files; give some such as 1.png and 1.cls")
            picture = _picture(path, list(first[1]), columns)

            def samples() -> Iterator[tuple[str, dict[str, object]]]:
                for key, members in chain([first], both):
                    values = _values(path, file, members)
                    if picture is not None:
                        if picture not in members:
                            raise BadData(f"{path} has no file '{picture}' in sample '{key}'; add it")
                        values[picture] = b""
                        shown.append(members[picture])
                    yield f"sample '{key}'", values

            table = arrow_table(path, samples())
        pictures = None
        if picture is not None:
            pictures = Pictures(
                path,
                [stamp(path), picture],
                [member.name for member in shown],
                lambda number: shown[number].content_in(path),
            )
        return read_table(
            Table.of(path, table, pictures),
            *(target, picture or columns, missing, size, bool(skip_bad), labelled, group),
        )


@dataclass(frozen=True)
class _Member:
    """A file in an archive.

    Attributes:
        name: of it, for messages, too.
        offset: of its content in the archive.
        size: of that, in bytes.
    """

    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """Key that all files of a sample share."""
        return self.name.removesuffix("." + self.ending)

    @property
    def ending(self) -> str:
        """Extension: all after the first dot of its name, in small letters as in "jpg"."""
        return self.name.rpartition("/")[2].partition(".")[2]

    def content(self, file: BinaryIO) -> bytes:
        """Read it from the archive, without moving on in that."""
        return os.pread(file.fileno(), self.size, self.offset)

    def content_in(self, path: Path) -> bytes:
        """Read it from the archive of a path."""
        with open_data_file(path) as file:
            return self.content(file)


def _members(path: Path, file: BinaryIO) -> Iterator[_Member]:
    """The files in an archive.

    Raises:
        BadData: it is damaged, or has something else than files and folders.
    """
    length = os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (entry := archive.next()) is not None:
                cast("Any", archive).members.clear()  # it would remember all
                name = printable(entry.name)
                if entry.isdir():
                    continue
                if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise BadData(
                        f"{path} has '{name}', which is a link, a device or a file with holes; pack files"
                    )
                if not PurePosixPath(entry.name).name.startswith("."):
                    yield _Member(name, entry.offset_data, entry.size)
            file.seek(archive.offset)
            rest = file.read(_END)
    except (tarfile.TarError, EOFError, OSError, ValueError, MemoryError, OverflowError) as error:
        raise damaged(path, error) from error
    if not rest or rest.strip(b"\0"):
        said = "goes on with something else" if rest else "lacks its end mark"
        raise BadData(
            f"{path} is truncated or damaged ({length:,} bytes): after {archive.offset:,} bytes it {said}; "
            "copy it again, and give several archives as several files"
        )


def _by_ending(path: Path, members: Iterator[_Member]) -> dict[str, _Member]:
    found: dict[str, _Member] = {}
    for member in members:
        if member.ending in found:
            raise BadData(f"{path} has the file '{member.name}' twice; leave one out")
        found[member.ending] = member
    return found


def _picture(path: Path, endings: list[str], columns: object) -> str | None:
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


def _values(path: Path, file: BinaryIO, members: Mapping[str, _Member]) -> dict[str, object]:
    """Return the arrays, numbers and texts in the files of a sample by name."""
    values: dict[str, object] = {}
    for ending, member in members.items():
        kind = ending.lower().rpartition(".")[2]
        if kind not in ("npy", "json", "cls", "txt"):
            continue
        try:
            found = _value(kind, member.content(file))
        except (ValueError, RecursionError) as error:
            raise BadData(
                f"{path} is broken in its file '{member.name}': {printable(str(error)[:200])}; mend it or "
                "leave its sample out"
            ) from error
        named = found if isinstance(found, dict) else {ending.removesuffix(".npy"): found}
        if twice := values.keys() & named.keys():
            raise BadData(f"{path} has '{min(twice)}' in two files of sample '{member.key}'; leave one out")
        values |= named
    return values


def _value(kind: str, content: bytes) -> object:
    if kind == "npy":
        array = npy_array(content)
        return array if array.ndim else array.item()
    if kind == "json":
        found: object = json.loads(content)
        return found
    text = content.decode().strip()
    whole = kind == "cls" and text.removeprefix("-").isdecimal() and len(text) < 19
    return int(text) if whole else text
