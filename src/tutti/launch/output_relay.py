"""The relay of the ranks' output, line by line, each with its rank before it.

rank 0 ──pipe──┐
rank 1 ──pipe──┼── a thread of the supervisor ──▶ the supervisor's own output: "[rank 1] text"
rank 2 ──pipe──┘   puts whole lines together

A carriage return begins a line again, as on a terminal: of a progress bar its last state remains.
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


@dataclass
class _RankStream:
    """One of the two outputs of a rank, and the descriptor of the supervisor to which its lines go."""

    source: FileIO
    prefix: bytes
    target: int
    pending: bytes = b""

    def read(self) -> bool:
        """Hand on the lines that are there; returns whether more may come, and somebody reads them."""
        try:
            while not self.source.closed:
                data = self.source.read(_PIECE)
                if not data:
                    return data is None
                *lines, self.pending = (self.pending + data).split(b"\n")
                for line in lines:
                    self._put(line)
                # A bar that is drawn for hours must not fill the memory.
                self.pending = b"\r".join(self.pending.split(b"\r")[-2:])
        except OSError:
            pass
        return False

    def finish(self) -> None:
        """Hand on the last line, if it did not end."""
        if self.pending:
            self._put(self.pending)

    def _put(self, line: bytes) -> None:
        visible = next((part for part in reversed(line.split(b"\r")) if part), b"")
        rest = memoryview(self.prefix + visible + b"\n")
        while rest:
            try:
                rest = rest[os.write(self.target, rest) :]
            except BlockingIOError:
                select.select([], [self.target], [])
            except OSError as error:
                if no_room(error) is None:
                    raise
                return  # What finds no room is lost: see `tutti.terminal`.


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
        targets = to[:1] if identity(to[0]) == identity(to[1]) else to
        self._streams: list[_RankStream] = []
        self.outputs: list[tuple[int, int]] = []
        for rank in range(ranks):
            writing = []
            for target in targets:
                reading, end = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(reading, False)
                self._streams.append(_RankStream(FileIO(reading), f"[rank {rank}] ".encode(), target))
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
                    if key.data is not None and not key.data.read():
                        selector.unregister(key.fd)
                        # Writing fails for the rank from now on.
                        key.data.source.close()
        for stream in self._streams:
            stream.read()
            with suppress(OSError):
                stream.finish()

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
