"""Standard output and standard error, and tables and bars on a terminal, by rich."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console


def say_last(text: str) -> None:
    """Write out what is buffered, and then `text` to standard error: the process is about to be gone.

    What cannot be written is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or of a class that fails in its own way
            stream.flush()
    data = text.encode(errors="backslashreplace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


@contextmanager
def lasting_output() -> Iterator[None]:
    """Print characters that the encoding does not have as escapes; a reader that has gone is no error."""
    streams = [one for one in (sys.stdout, sys.stderr) if isinstance(one, io.TextIOWrapper)]
    for stream in streams:
        # Where its descriptor has become a pipe it cannot seek; it has the new errors all the same.
        with suppress(OSError):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream in streams:
            # Its reader may have gone; and the program may have closed the stream.
            with suppress(BrokenPipeError, ValueError):
                stream.flush()


UNBOUNDED: Final = 1 << 16
"""More columns than any line has: what is printed is neither wrapped nor cut."""


def console_on(stream: IO[str], columns: int | None = UNBOUNDED) -> Console:
    """Return a console that writes texts to `stream` as they are: names may have what looks like markup."""
    # Most commands print no table, and importing it takes as long as all else at their start.
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
    """Return whether a user sees what is written; Open MPI gives its processes a terminal that none sees."""
    return stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


def say_on_stderr(text: str) -> None:
    """Print a sentence on standard error, at once; work goes on if its reader is gone."""
    with suppress(BrokenPipeError):
        print(f"tutti: {text}", file=sys.stderr, flush=True)


def warn_on_stderr(text: str) -> None:
    """Print a warning on standard error, as `say_on_stderr` does."""
    say_on_stderr(f"warning: {text}")
