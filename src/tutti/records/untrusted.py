"""Files and texts of others: written through no link, and made safe to print.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import json
import os
from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""Invisible letters that join or part their neighbours, in several scripts."""


def open_unlinked(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to write, unless it is a link; also an opener for `open`.

    A link in a folder of somebody else would have a run that goes on in it write into any file of the user's.

    Args:
        path: of the file.
        flags: of `os.open`.

    Returns:
        Its descriptor; a new file has the permissions that the user's umask leaves.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


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
