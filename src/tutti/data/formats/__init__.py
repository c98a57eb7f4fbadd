"""The data file formats, a file for each, and what their readers share. Errors name the file and the bytes.

A format is known by the first bytes of a file, not by its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from tutti.data.contents import Contents
from tutti.errors import BadData
from tutti.records.npz import open_data_file
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
