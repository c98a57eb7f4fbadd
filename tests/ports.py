"""Ports for programs that must be told one before they listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports of this host that the system gives to nobody who asks for any, while the context lasts.

    A socket is bound to each and does not listen: so whoever is told the port can listen there, if,
    as torch's stores do, it sets SO_REUSEADDR too.
    """
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [holder.getsockname()[1] for holder in holders]
