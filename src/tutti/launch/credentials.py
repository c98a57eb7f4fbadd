"""The users at the two ends of a Unix socket, as the kernel tells them. Needs no torch."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")


def user_of(connection: socket.socket) -> int:
    """Return the number of the user whose process is at the other end of a Unix socket."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def is_mine(connection: socket.socket) -> bool:
    """Tell whether the process at the other end is one of this user's."""
    return user_of(connection) == os.geteuid()
