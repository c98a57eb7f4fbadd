"""Texts of others, made safe to print. Needs neither torch nor MPI."""

from __future__ import annotations

from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""Invisible letters that join or part their neighbours, in several scripts."""


def printable(text: str, lines: bool = False) -> str:
    """Return a text that is safe to print: control characters, which a terminal would obey, are escaped."""
    if text.isprintable():
        return text
    kept = _JOINERS + ("\n\t" if lines else "")
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text
    )
