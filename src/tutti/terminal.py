"""Tables and bars on a terminal, by rich."""

from __future__ import annotations

from typing import IO, Final

from rich.console import Console

WIDE: Final = 160
"""Columns of text where there is no terminal."""

UNBOUNDED: Final = 1 << 16
"""More columns than any line has: what is printed is neither wrapped nor cut."""


def console_on(stream: IO[str], columns: int | None = WIDE) -> Console:
    """A console that writes texts to `stream` as they are: names may have what looks like markup.

    Args:
        stream: where to.
        columns: of text, where it is no terminal; None: as rich thinks.
    """
    width = None if stream.isatty() else columns
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
