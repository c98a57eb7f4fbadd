"""Tables and bars on a terminal, by rich."""

from __future__ import annotations

from typing import IO, Final

from rich.console import Console

WIDE: Final = 160
"""Columns of text where there is no terminal."""


def console_on(stream: IO[str], wide: bool = True) -> Console:
    """A console that writes texts to `stream` as they are: names may have what looks like markup.

    Args:
        stream: where to.
        wide: whether there is room for tables where it is no terminal.
    """
    width = WIDE if wide and not stream.isatty() else None
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
