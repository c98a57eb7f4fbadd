"""The progress of reading a file, on standard error. The kernel counts the bytes that a process reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final

from tutti.records.texts import printable
from tutti.terminal import is_terminal, say_on_stderr

LONG_S: Final = 2.0
"""The seconds after which reading counts as long."""

_REFRESH_S: Final = 0.5


@contextmanager
def reading_shown(data: object, shows: bool = True) -> Iterator[None]:
    """Show that a file is read in this block, if that takes long: a line that is rewritten on a terminal.

    Elsewhere it is printed once. Nothing is shown for other data than files, or without `shows`.
    """
    path = Path(data).expanduser() if isinstance(data, str | Path) else None
    if not shows or path is None or not path.exists():
        yield
        return
    over = Event()
    thread = Thread(target=show_reading, args=(path, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def show_reading(path: Path, over: Event) -> None:
    """Show the progress until `over` is set."""
    size, before = path.stat().st_size if path.is_file() else 0, _bytes_read()
    name, length = printable(path.name), 0
    while not over.wait(_REFRESH_S if length else LONG_S):
        share = min(1.0, (_bytes_read() - before) / size) if size else 0.0
        text = f"reading {name}" + (f", {size / 1e6:,.0f} MB" if size else "")
        if not is_terminal(sys.stderr):
            return say_on_stderr(text)
        text += f": {share:.0%}" if share else ""
        print(f"\r{text:{length}}", end="", file=sys.stderr, flush=True)
        length = len(text)
    if length:
        print(f"\r{'':{length}}\r", end="", file=sys.stderr, flush=True)
    return None


def _bytes_read() -> int:
    """Return the number of bytes that this process has read; mapped files do not count."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/io").read_text().split()[1])
    return 0
