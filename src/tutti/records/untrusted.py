"""Texts of others, made safe to print. Needs neither torch nor MPI."""

from __future__ import annotations

import json
from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""Invisible letters that join or part their neighbours, in several scripts."""


def parse_json(text: bytes | str) -> object:
    """Parse a JSON text, whose strings `printable` makes safe."""
    try:
        return _shown(json.loads(text))
    except RecursionError:
        raise ValueError("it has too many levels") from None


def printable(text: str, lines: bool = False) -> str:
    """Return a text that is safe to print: control characters, which a terminal would obey, are escaped."""
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
