"""The connection between a worker and a centre that is a process of its own: authenticated messages over TCP.

    worker                                        centre
      │ ◀── both show that they have the key: an HMAC challenge each way
      │ {"worker": its id, "model": [[name, shape, dtype, order], ...]} ──▶ │   join
      │ ◀── {"begun": whether it has weights, "number": of this worker's last message}, or {"refused": why}
      │ {"number": n, "settings": [...], "reads": true}, vectors ──▶ │   a message, or without a number none
      │ ◀── {"version": v}, vectors if it reads
      │ {"begins": true, ...}, vectors ──▶ │   the first weights, if it has none; ◀── {"version": v}

Headers are JSON, vectors raw bytes, so nothing that arrives is code. Only the begin of a connection is
authenticated, and nothing is encrypted: a network that others may change needs a tunnel.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

import torch

from tutti.errors import BadModel, BadOption
from tutti.parameter_server.base import Vectors
from tutti.replica import Flat
from tutti.state import order_of

KEY: Final = "TUTTI_CENTRE_KEY"
"""The environment variable with the key, where no file is given."""

LEAST_KEY: Final = 16
"""The fewest characters of a key: shorter ones can be guessed from an overheard challenge."""

SILENCE_S: Final = 30
"""The seconds after which a peer that does not answer counts as lost."""

UNREACHABLE_S: Final = 10
"""The seconds after which it does if its host does not even acknowledge what was sent."""

LOST: Final = (OSError, EOFError)
"""The errors of a connection whose other end is gone or silent."""

_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A peer may be silent between two messages: the kernels see whether its host is there.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREACHABLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNREACHABLE_S // 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREACHABLE_S * 1000),
)

_MOST_HEADER: Final = 1 << 26
"""The most bytes of a header; that of a join has a line for each parameter."""


class Link:
    """One end of a connection. Its methods raise one of `LOST` when the other end is gone or silent."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        for level, option, value in _OPTIONS:
            end.setsockopt(level, option, value)
        self._socket, self._connection = end, Connection(end.dup().detach())

    def limit(self, seconds: int) -> None:
        """Raise where nothing comes, or nothing can be sent, for this time; 0: for any time."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def authenticate(self, key: bytes, *, listens: bool) -> None:
        """Show that this end has the key, and see that the other one has it; else AuthenticationError."""
        steps = (deliver_challenge, answer_challenge)
        for step in steps if listens else reversed(steps):
            step(self._connection, key)

    def send(self, header: dict[str, Any], vectors: Vectors = ()) -> int:
        """Send a header and vectors; return the bytes of the vectors."""
        self._connection.send_bytes(json.dumps(header).encode())
        for vector in vectors:
            self._connection.send_bytes(_memory(vector))
        return sum(vector.nbytes for vector in vectors)

    def receive(self) -> dict[str, Any]:
        """Receive a header."""
        header: dict[str, Any] = json.loads(self._connection.recv_bytes(_MOST_HEADER))
        return header

    def receive_into(self, vectors: Vectors) -> None:
        """Overwrite the vectors with those that follow a header."""
        for vector in vectors:
            received = self._connection.recv_bytes_into(_memory(vector))
            if received != vector.nbytes:
                raise OSError(f"a vector has {received} bytes, and should have {vector.nbytes}")

    def shut(self) -> None:
        """End the connection, from any thread; one that waits for the other end stops waiting."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, from the thread that uses it."""
        self.shut()
        self._connection.close()
        self._socket.close()


def _memory(vector: torch.Tensor) -> memoryview:
    return vector.view(torch.uint8).numpy().data


def join(address: str, key: bytes, worker: dict[str, Any]) -> tuple[Link, dict[str, Any]]:
    """Connect to a centre, and join; return its answer.

    Raises:
        OSError, EOFError: it cannot be reached now.
        BadOption: it has another key, or no centre listens there.
        BadModel: it has another model.
    """
    link = Link(socket.create_connection(address_of(address), timeout=UNREACHABLE_S))
    try:
        link.limit(SILENCE_S)
        link.authenticate(key, listens=False)
        link.send(worker)
        answer = link.receive()
        if "refused" in answer:
            raise BadModel(answer["refused"])
    except (AuthenticationError, AssertionError) as error:
        link.close()
        raise BadOption(
            f"the centre at {address} has another key; give both the same, by '--strategy.key FILE' here and "
            f"'--key FILE' there, or {KEY}"
        ) from error
    except (*LOST, BadModel):
        link.close()
        raise
    return link, answer


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; refuse another text by BadOption."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BadOption(f"'{text}' is no address of a centre; give HOST:PORT, such as 10.0.0.1:7070")
    return host.strip("[]"), int(port)


def read_key(file: str) -> bytes:
    """Return the key in a file, or that of the environment if `file` is empty.

    Raises:
        BadOption: there is none, or it is too short.
    """
    try:
        key = (Path(file).read_text() if file else os.environ.get(KEY, "")).strip()
    except (OSError, ValueError) as error:
        raise BadOption(f"cannot read the key of the centre in {file}: {error}") from error
    if len(key) < LEAST_KEY:
        raise BadOption(
            f"a centre and its workers need a key of at least {LEAST_KEY} characters, the same on all; make "
            f"one with 'openssl rand -hex 32 > key.txt', and give the file, or set {KEY}"
        )
    return key.encode()


def describe(flats: Sequence[Flat]) -> list[list[Any]]:
    """Return [name, shape, dtype, order in memory] of each parameter, in the order of the vectors."""
    return [
        [name, list(parameter.shape), str(parameter.dtype).removeprefix("torch."), order_of(parameter)]
        for flat in flats
        for name, parameter in zip(flat.names, flat.parameters, strict=True)
    ]
