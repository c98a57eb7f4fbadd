"""Standard output and standard error, and tables and bars on a terminal, by rich."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console


def say_last(text: str) -> None:
    """Flush the streams, and write `text` to standard error before the process ends; ignore errors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or of a class with errors of its own
            stream.flush()
    data = text.encode(errors="backslashreplace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


@contextmanager
def lasting_output() -> Iterator[None]:
    """Print characters missing from the encoding as escapes, and tolerate a reader that has gone."""
    streams = [one for one in (sys.stdout, sys.stderr) if isinstance(one, io.TextIOWrapper)]
    for stream in streams:
        # A descriptor that has become a pipe cannot seek; the new error handler is set all the same.
        with suppress(OSError):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream in streams:
            # The reader may have gone, and the program may have closed the stream.
            with suppress(BrokenPipeError, ValueError):
                stream.flush()


UNBOUNDED: Final = 1 << 16
"""More columns than any line has: lines are neither wrapped nor cut."""


def console_on(stream: IO[str], columns: int | None = UNBOUNDED) -> Console:
    """Return a console that writes texts to `stream` unchanged: names may look like markup."""
    # Most commands print no table, and importing rich would double their start time.
    from rich.console import Console

    terminal = is_terminal(stream)
    return Console(
        file=stream,
        width=None if terminal else columns,
        force_terminal=None if terminal else False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def is_terminal(stream: IO[str]) -> bool:
    """Return whether a user sees the output; Open MPI gives its processes a terminal that no user sees."""
    return stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


IMPORTING: Final = "importing torch"

_SHOWN_AFTER_S: Final = 0.5


@contextmanager
def wait_shown(what: str, logged_after_s: float | None = None) -> Iterator[None]:
    """Show what this block waits for in a line that goes away.

    Elsewhere than on a terminal, the line is printed once if the block takes more than `logged_after_s`.
    """
    terminal, over = is_terminal(sys.stderr), Event()
    if not terminal and logged_after_s is None:
        yield
        return
    show = _show_line if terminal else partial(_say_after, logged_after_s)
    thread = Thread(target=show, args=(what, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show_line(text: str, over: Event) -> None:
    """Show a line of a terminal until `over` is set, unless that is soon."""
    if not over.wait(_SHOWN_AFTER_S):
        print(f"\r{text}", end="", file=sys.stderr, flush=True)
        over.wait()
        print(f"\r{'':{len(text)}}\r", end="", file=sys.stderr, flush=True)


def _say_after(seconds: float | None, text: str, over: Event) -> None:
    if not over.wait(seconds):
        say_on_stderr(text)


def say_on_stderr(text: str) -> None:
    """Print a sentence on standard error, at once; ignore that its reader is gone."""
    with suppress(BrokenPipeError):
        print(f"tutti: {text}", file=sys.stderr, flush=True)


def warn_on_stderr(text: str) -> None:
    """Print a warning on standard error, as `say_on_stderr` does."""
    say_on_stderr(f"warning: {text}")
