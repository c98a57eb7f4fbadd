"""Files and texts of others: read within bounds, and made safe to print.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

MOST_BYTES: Final = 1 << 30
"""The size above which a file of records is refused: it would fill the memory."""

MOST_RANKS: Final = 1 << 16
"""The most ranks of a run, and the most threads of a rank."""

_JOINERS: Final = "\u200c\u200d"
"""Invisible letters that join or part their neighbours, in several scripts."""


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file, or one that a link leads to.

    Raises:
        OSError: it cannot be read, is a pipe or a device, or has more than `most` bytes.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}")
        # Not `most`, for which `read` would ask for so much memory at once.
        return file.read(size)


def read_tail(path: Path, most: int) -> bytes:
    """Read the last bytes of a regular file, `most` at most.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        return file.read(min(size, most))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read it.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device.
    """
    # A pipe would not open before somebody writes to it.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file")
    return file


def parse_json(text: bytes | str) -> object:
    """Parse a JSON text, whose strings `printable` makes safe.

    Raises:
        ValueError: it is no JSON, or has too many levels.
    """
    try:
        return _shown(json.loads(text))
    except RecursionError:
        raise ValueError("it has too many levels") from None


def printable(text: str, lines: bool = False) -> str:
    """Return a text that is safe to print: control characters, which a terminal would obey, are escaped.

    Args:
        text: any; characters that no encoding has are escaped too.
        lines: keep line ends and tabs.
    """
    if text.isprintable():
        return text
    kept = _JOINERS + ("\n\t" if lines else "")
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text
    )


def _shown(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): _shown(item) for name, item in value.items()}
    return value
