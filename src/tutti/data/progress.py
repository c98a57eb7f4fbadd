"""A line on standard error about a file that takes long to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Final

from tutti.records.texts import printable
from tutti.terminal import say_on_stderr

LONG_S: Final = 2.0
"""The seconds after which reading counts as long."""


@contextmanager
def reading_shown(data: object, shows: bool = True) -> Iterator[None]:
    """Say once that a file is read in this block, if that takes long; nothing of data that are no file."""
    path = Path(data).expanduser() if isinstance(data, str | Path) else None
    if not shows or path is None or not path.exists():
        yield
        return
    size = f", {path.stat().st_size / 1e6:,.0f} MB" if path.is_file() else ""
    timer = Timer(LONG_S, say_on_stderr, [f"reading {printable(path.name)}{size}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
