"""Standard output and standard error, and tables and bars on a terminal, by rich.

Output outlasts a full disk: what cannot be written is lost, work goes on. A reader that has gone is another
matter (`tutti ... | head`): the printing code gets a `BrokenPipeError`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console


_DESCRIPTORS: Final = (0, 1, 2)


class LastingFile(io.FileIO):
    """A file whose writes never fail, but for a reader that has gone.

    Args:
        descriptor: of the file; it stays open.
        prefix: written before each line.

    Attributes:
        problem: why the first write that failed did so; None as long as none did.
    """

    def __init__(self, descriptor: int, prefix: bytes = b"") -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.problem: OSError | None = None
        self._prefix, self._line_begins = prefix, True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write `data`, or lose it; returns its length."""
        try:
            return self._write_lines(bytes(data)) if self._prefix else super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            self.problem = self.problem or error
            return len(memoryview(data).cast("B"))

    def _write_lines(self, data: bytes) -> int:
        """Write lines in one piece: other processes write to the same terminal."""
        lines = data.splitlines(keepends=True)  # A carriage return begins a line again.
        rest = memoryview((self._prefix if self._line_begins else b"") + self._prefix.join(lines))
        self._line_begins = data.endswith((b"\n", b"\r"))
        while rest:
            rest = rest[super().write(rest) or 0 :]
        return len(data)


def say_last(text: str) -> None:
    """Write out what is buffered, and then `text` to standard error: the process is about to be gone.

    What cannot be written is lost, whatever the program has made of its streams.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or of a class that fails in its own way
            stream.flush()
    data = text.encode(errors="backslashreplace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def identity(descriptor: int) -> tuple[int, int]:
    """The identity of the file, pipe or terminal behind a descriptor.

    Raises:
        OSError: the descriptor is closed.
    """
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


@contextmanager
def lasting_output(prefix: bytes = b"") -> Iterator[LastingFile | None]:
    """Have what this process prints outlast a full disk, inside of the block.

    It yields the file that standard output is written to; None where that is left as it is.

    Streams that are not those that the process began with, as in a notebook, are left alone. A descriptor
    that was closed (`>&-`) becomes one of /dev/null: the next file to be opened would be taken for it else.
    """
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    files: dict[str, LastingFile] = {}
    for descriptor, (name, stream) in enumerate(before.items(), start=1):
        if stream is None or (stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper)):
            files[name] = LastingFile(descriptor, prefix)
            setattr(sys, name, _text_on(files[name], stream))
    try:
        yield files.get("stdout")
    finally:
        for name in files:
            # Its reader may have gone; and the program may have closed the stream.
            with suppress(BrokenPipeError, ValueError):
                getattr(sys, name).flush()
            setattr(sys, name, before[name])


def _text_on(file: LastingFile, like: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """A text stream to a file; what its encoding does not have is written out."""
    if like is not None:
        with suppress(OSError):
            like.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=None if like is None else like.encoding,
        errors="backslashreplace",
        line_buffering=True if like is None else like.line_buffering,
    )


UNBOUNDED: Final = 1 << 16
"""More columns than any line has: what is printed is neither wrapped nor cut."""


def console_on(stream: IO[str], columns: int | None = UNBOUNDED) -> Console:
    """A console that writes texts to `stream` as they are: names may have what looks like markup.

    Args:
        stream: where to.
        columns: of text, where it is no terminal; None: as rich thinks.
    """
    # Most commands print no table, and importing it takes as long as all else at their start.
    from rich.console import Console

    # Open MPI gives its processes a terminal of its own, which nobody looks at.
    terminal = stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
    return Console(
        file=stream,
        width=None if terminal else columns,
        force_terminal=None if terminal else False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def say_on_stderr(text: str) -> None:
    """Print a sentence on standard error, at once; where nobody reads that any more, work goes on."""
    with suppress(BrokenPipeError):
        print(f"tutti: {text}", file=sys.stderr, flush=True)


def warn_on_stderr(text: str) -> None:
    """Print a warning on standard error, as `say_on_stderr` does."""
    say_on_stderr(f"warning: {text}")
