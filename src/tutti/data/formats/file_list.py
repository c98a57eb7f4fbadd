"""Text files that list the files of a data set, one a line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format, nearest, read_files
from tutti.errors import BadData
from tutti.records.npz import open_data_file
from tutti.records.untrusted import printable
from tutti.registry import part


@part("list")
class FileList(Format):
    """Text files with the path of a file in each line; the samples of all of them are one data set."""

    endings = (".txt", ".list", ".lst")

    @staticmethod
    @override
    def check(path: Path) -> None:
        """Refuse a list with a line that names no file."""
        _files(path)

    @staticmethod
    @override
    def read(
        path: Path, missing: str = "error", labelled: bool = True, **options: object
    ) -> Contents[object]:
        """Read the files of a list; further options are those of their format.

        Args:
            path: of the list. Paths in it count from its folder; after # a line may say anything.
            missing: as for each file.
            labelled: likewise.
            options: likewise.
        """
        contents = read_files(_files(path), {**options, "missing": missing}, labelled)
        return replace(contents, name=path.stem)

    @staticmethod
    @override
    def files(path: Path) -> list[Path]:
        """Return the files."""
        return _files(path)


def _files(path: Path) -> list[Path]:
    """The files that a list names.

    Raises:
        BadData: a line names none, or there are no lines.
    """
    with open_data_file(path) as file:
        try:
            lines = file.read(1 << 26).decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise BadData(
                f"{path} is no text in UTF-8, so no list of files; name it by its format"
            ) from error
    files = []
    for number, line in enumerate(lines, 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        one, shown = path.parent / os.path.expanduser(name), printable(name[:200])
        # It may be no path at all: those of pathlib raise then.
        if not os.path.exists(one):
            raise BadData(f"{path} names no file in line {number:,}: there is no '{shown}'; {nearest(one)}")
        if one.name.lower().endswith(FileList.endings):
            raise BadData(f"{path} lists {shown} in line {number:,}, which is a list itself; list its files")
        files.append(one)
    if not files:
        raise BadData(f"{path} lists no files; write the path of one in each line")
    return files
