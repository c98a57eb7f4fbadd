"""The channel between a rank and the process that has started it: pickled objects, both ways."""

from __future__ import annotations

import os
import socket
from typing import Final

from tutti.launch.exit_reports import encode, take

_PIECE: Final = 1 << 20


class Channel:
    """One end of a channel.

    Args:
        end: the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._objects: list[object] = []

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Make one: this process's end, which never waits when it reads, and the other, to be handed on."""
        own, theirs = socket.socketpair()
        return cls(own), theirs

    def fileno(self) -> int:
        """A descriptor that is readable when something has come."""
        return self._socket.fileno()

    def send(self, what: object) -> bool:
        """Send an object; returns False if nobody is there any more."""
        try:
            self._socket.sendall(encode(what))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> object:
        """Wait for the next object.

        Raises:
            EOFError: the other end is closed.
        """
        while not self._objects:
            self._read(self._socket.recv(_PIECE))
        return self._objects.pop(0)

    def received(self) -> list[object] | None:
        """Return the objects that have come, without waiting; None if the other end is closed."""
        over = False
        try:
            while True:
                self._read(self._socket.recv(_PIECE, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except (EOFError, ConnectionResetError):
            over = True
        found, self._objects = self._objects, []
        return None if over and not found else found

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, data: bytes) -> None:
        if not data:
            raise EOFError
        self._received += data
        self._objects += take(self._received)


_own: Channel | None = None


def adopt(descriptor: int) -> None:
    """Make a socket the channel of this process to the one that has started it."""
    global _own
    os.set_inheritable(descriptor, False)
    _own = Channel(socket.socket(fileno=descriptor))


def own() -> Channel:
    """Return the channel of this process."""
    assert _own is not None, "this rank was given none"
    return _own
