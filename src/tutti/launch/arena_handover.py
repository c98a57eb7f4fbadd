"""The hand-over of an anonymous file to all ranks of a host, before they can talk to each other.

rank 0   creates it, listens on a Unix socket named after the job ──its descriptor──▶ the other ranks

The socket is in the abstract namespace, so that no file is left behind. The kernel tells each side which user
owns the process at the other end: other users get nothing, and nothing is accepted from them.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final

from tutti.comm.shm import memfd
from tutti.errors import PeerLost, UserError

RETRY_S: Final = 0.01
"""How long a rank waits before it looks again whether rank 0 is there."""

_CREDENTIALS: Final = struct.Struct("3i")


def shared_file(job: str, rank: int, size: int, timeout_s: float) -> int:
    """Return a descriptor of the anonymous file that all ranks of a job on this host share (collective).

    Args:
        job: equal on all ranks of the job, and on no others of this user.
        rank: this process's number among them.
        size: their number.
        timeout_s: how long to wait for rank 0.

    Raises:
        UserError: the socket's name is taken, or belongs to another user.
        PeerLost: rank 0 did not come.
    """
    name = "\0tutti-" + hashlib.sha256(f"{os.geteuid()} {job}".encode()).hexdigest()
    if rank == 0:
        file = memfd.make("store")
        _offer(name, file, size - 1)
        return file
    return _take(name, timeout_s)


def _offer(name: str, file: int, others: int) -> None:
    """Hand the file to `others` processes of this user, in a thread."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(name)
    except OSError as error:
        server.close()
        raise UserError(
            "another process of this host has the name under which the ranks of this job would meet; start "
            "one job after the other, or say where they are to meet: MASTER_ADDR and MASTER_PORT"
        ) from error
    server.listen(others)

    def serve() -> None:
        left = others
        with server:
            while left:
                connection, _ = server.accept()
                with connection:
                    if _user_of(connection) == os.geteuid():
                        # A rank that was interrupted connects again.
                        with suppress(OSError):
                            socket.send_fds(connection, [b"."], [file])
                            left -= 1

    threading.Thread(target=serve, name="tutti-handing", daemon=True).start()


def _take(name: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
            try:
                connection.connect(name)
                owner = _user_of(connection)
                if owner != os.geteuid():
                    raise UserError(
                        f"user {owner} has taken the name under which the ranks of this job would meet; say "
                        "where they are to meet: MASTER_ADDR and MASTER_PORT"
                    )
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
            except OSError:
                time.sleep(RETRY_S)
                continue
        if files:
            os.set_inheritable(files[0], False)
            memfd.check(files[0])
            return files[0]
    raise PeerLost([0], f"it did not come within {timeout_s:g} s")


def _user_of(connection: socket.socket) -> int:
    """Return the user whose process is at the other end, as the kernel reports it."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
