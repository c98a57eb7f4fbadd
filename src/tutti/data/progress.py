"""The progress of reading a file, on standard error. The kernel counts the bytes that a process reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Final

from tutti.records.texts import printable
from tutti.terminal import beside, is_terminal, say_on_stderr, show_line

LONG_S: Final = 2.0
"""The seconds after which reading counts as long, without a terminal."""


@contextmanager
def reading_shown(data: object, shows: bool = True) -> Iterator[None]:
    """Show that a file is read in this block, if that takes long: a line that is rewritten on a terminal.

    Elsewhere it is printed once. Nothing is shown for other data than files, or without `shows`.
    """
    path = Path(data).expanduser() if isinstance(data, str | Path) else None
    if not shows or path is None or not path.exists():
        yield
        return
    with beside(lambda over: show_reading(path, over)):
        yield


def show_reading(path: Path, over: Event) -> None:
    """Show the progress until `over` is set."""
    size, before = path.stat().st_size if path.is_file() else 0, _bytes_read()
    text = f"reading {printable(path.name)}" + (f", {size / 1e6:,.0f} MB" if size else "")

    def with_share() -> str:
        share = min(1.0, (_bytes_read() - before) / size) if size else 0.0
        return text + (f": {share:.0%}" if share else "")

    if is_terminal(sys.stderr):
        show_line(with_share, over)
    elif not over.wait(LONG_S):
        say_on_stderr(text)


def _bytes_read() -> int:
    """Return the number of bytes that this process has read; mapped files do not count."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/io").read_text().split()[1])
    return 0
