"""The data file formats, a file for each, and what their readers share. Errors name the file and the bytes.

A format is known by the first bytes of a file, not by its name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from tutti.data.contents import Contents
from tutti.errors import BadData
from tutti.records.untrusted import open_file
from tutti.registry import Registry


class Format(Protocol):
    """A data file format."""

    start: bytes
    """The first bytes of its files."""

    @staticmethod
    def read(path: Path) -> Contents[object]:
        """Read the data set in a file that begins with `start`, through `open_data_file`.

        Returns:
            `Contents(name, {"train": (inputs, targets)})`, with a part "test" where the file has one.

        Raises:
            BadData: it is broken, or files that belong to it are missing.
        """


FORMATS: Final[Registry[Format]] = Registry("tutti.data.formats", "data file format")
"""The formats by name."""


def read_start(path: Path, count: int = 4) -> bytes:
    """Read the first bytes of a file.

    Raises:
        BadData: the file cannot be opened, or it is empty.
    """
    with open_data_file(path) as file:
        start = file.read(count)
    if not start:
        raise BadData(f"{path} is empty (0 bytes); copy or download it again")
    return start


def open_data_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        BadData: it cannot be opened, or is a pipe or a device.
    """
    try:
        return open_file(path)
    except OSError as error:
        raise BadData(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error


def refuse_larger_than_memory(path: Path, nbytes: int) -> None:
    """Refuse data that this machine's memory does not hold."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise BadData(
            f"{path} holds {nbytes:,} bytes of data, and this machine has {memory:,} bytes of memory; give a "
            "part of it, or a factory of a data set that reads samples when they are needed"
        )


def nearest(path: Path) -> str:
    """Say which file a missing one may be, or which there are."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"{folder.resolve()} has: {listed(names) or 'nothing'}"


def listed(names: Sequence[str]) -> str:
    """List the first of some names."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
