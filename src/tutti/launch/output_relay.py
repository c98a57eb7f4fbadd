"""The relay of the ranks' output, line by line, each with its rank before it.

rank 0 ──pipe──┐
rank 1 ──pipe──┼── a thread of the supervisor ──▶ the supervisor's own output: "[rank 1] text"
rank 2 ──pipe──┘   puts whole lines together

A carriage return begins a line anew, as on a terminal: of a progress bar its last state remains. A terminal
shows the states in between, too.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Final

from tutti.errors import no_room
from tutti.terminal import identity

_PIECE: Final = 1 << 16
_CLEAR: Final = b"\r\x1b[K"


@dataclass
class _Target:
    """An output of the supervisor, to which lines are written.

    Attributes:
        descriptor: of this process.
        terminal: whether somebody looks at it.
        unfinished: whether the terminal's last line is a progress bar, which the next line replaces.
    """

    descriptor: int
    terminal: bool
    unfinished: bool = False

    def put_line(self, line: bytes) -> None:
        """Write a whole line."""
        self._write((_CLEAR if self.unfinished else b"") + line + b"\n")
        self.unfinished = False

    def show(self, line: bytes) -> None:
        """Show a line that is not finished, where it can be replaced."""
        if self.terminal:
            width = os.get_terminal_size(self.descriptor).columns or 80
            self._write(_CLEAR + line.decode(errors="replace")[: width - 1].encode())
            self.unfinished = True

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self.descriptor], [])
            except OSError as error:
                if no_room(error) is None:
                    raise
                return  # What finds no room is lost: see `tutti.terminal`.


@dataclass
class _RankStream:
    """One of the two outputs of a rank."""

    source: FileIO
    prefix: bytes
    target: _Target
    pending: bytes = b""

    def read(self) -> bool:
        """Hand on the lines that are there; returns whether more may come.

        Raises:
            OSError: nobody reads them.
        """
        while not self.source.closed:
            data = self.source.read(_PIECE)
            if not data:
                return data is None
            self._take(data)
        return False

    def _take(self, data: bytes) -> None:
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            self.target.put_line(self.prefix + _visible(line))
        if b"\r" in self.pending:
            self.target.show(self.prefix + _visible(self.pending))
            # A bar that is drawn for hours must not fill the memory.
            self.pending = b"\r".join(self.pending.split(b"\r")[-2:])

    def finish(self) -> None:
        """Hand on the last line, if it did not end."""
        if self.pending:
            self.target.put_line(self.prefix + _visible(self.pending))
            self.pending = b""


def _visible(line: bytes) -> bytes:
    """Return the part of a line that carriage returns leave visible."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


class Relay:
    """Hands on what ranks print, from `start` to the end of the context: all that they have written by then.

    If nobody reads it any more, writing fails for the ranks too.

    Args:
        ranks: how many there are.
        to: the descriptors to which their standard output and standard error go.

    Attributes:
        outputs: for each rank the descriptors of its standard output and standard error.
    """

    def __init__(self, ranks: int, to: tuple[int, int] = (1, 2)) -> None:
        # What a rank writes to both stays in order if both go to one place.
        places = to[:1] if identity(to[0]) == identity(to[1]) else to
        targets = [_Target(place, os.isatty(place)) for place in places]
        self._streams: list[_RankStream] = []
        self.outputs: list[tuple[int, int]] = []
        for rank in range(ranks):
            writing = []
            for target in targets:
                reading, end = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(reading, False)
                source = FileIO(reading)
                self._streams.append(_RankStream(source, f"[rank {rank}] ".encode(), target))
                writing.append(end)
            self.outputs.append((writing[0], writing[-1]))
        self._ending, self._end = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="tutti-relay", daemon=True)

    def start(self) -> None:
        """Begin; the ranks have their outputs."""
        self._close_outputs()
        self._thread.start()

    def _close_outputs(self) -> None:
        for descriptor in {end for both in self.outputs for end in both}:
            os.close(descriptor)
        self.outputs.clear()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ending, selectors.EVENT_READ)
            for stream in self._streams:
                selector.register(stream.source, selectors.EVENT_READ, stream)
            going_on = True
            while going_on:
                for key, _ in selector.select():
                    going_on &= key.data is not None
                    if key.data is not None and not self._hand_on(key.data):
                        selector.unregister(key.fd)
                        # Writing fails for the rank from now on.
                        key.data.source.close()
        for stream in self._streams:
            self._hand_on(stream)
            with suppress(OSError):
                stream.finish()

    def _hand_on(self, stream: _RankStream) -> bool:
        """Hand on what is there; returns whether more may come, and somebody reads it."""
        try:
            return stream.read()
        except OSError:
            return False

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_outputs()
        os.close(self._end)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._ending)
        for stream in self._streams:
            stream.source.close()
