"""The messages between workers and servers.

    worker                                   server
      │ request: what, a detail, settings ─────▶ │   REQUEST
      │ its slice of each vector ──────────────▶ │   BODY + number of the vector     (begin, push,
      │                                          │                                   exchange)
      │ its slice of the weights at which that   │
      │ was computed, if the rule compares ────▶ │   likewise                        (push, exchange)
      │ what the rule has kept ────────────────▶ │   STATE                           (restore)
      │ ◀──── version, staleness, dropped answer │   ANSWER                          (all but state)
      │ ◀─────────────── its slice of each vector │   WEIGHTS + number of the vector  (pull, exchange, read,
      │                                          │                                   tick)
      │ ◀────────────────── what the rule keeps │   STATE                           (state)

Messages to one rank with one tag keep their order, so a server that has a request knows whose body is next.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Final, cast

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.state import LocalState

REQUEST: Final = 1 << 21
ANSWER: Final = REQUEST + 1
BODY: Final = REQUEST + 1000
STATE: Final = REQUEST + 2
WEIGHTS: Final = REQUEST + 2000


class Request(IntEnum):
    """A worker's request."""

    PUSH = 0
    EXCHANGE = 1
    PULL = 2
    READ = 3
    TICK = 4
    LEAVE = 5
    REJOIN = 6
    CLOSE = 7
    BEGIN = 8
    STATE = 9
    RESTORE = 10


def header(request: Request, detail: float, settings: Sequence[float]) -> Tensor:
    """Return a request as a vector: its kind, a detail, and the rule's settings."""
    return torch.tensor([request, detail, *settings], dtype=torch.float64)


def send_all(comm: Communicator, vectors: Sequence[Tensor], to: int, tag: int) -> int:
    """Send the vectors that are not empty; returns how many bytes they have."""
    for number, vector in enumerate(vectors):
        if len(vector):
            comm.send(vector, to, tag + number)
    return sum(vector.nbytes for vector in vectors)


def receive_all(comm: Communicator, vectors: Sequence[Tensor], source: int, tag: int) -> None:
    """Overwrite the vectors that are not empty with what `source` sends."""
    for number, vector in enumerate(vectors):
        if len(vector):
            comm.recv(vector, source, tag + number)


def send_held(comm: Communicator, held: LocalState, to: int) -> None:
    """Send what belongs to parameters."""
    # Copies: a view would be pickled with its whole base.
    pieces = [replace(piece, values=piece.values.clone()) for piece in held.pieces]
    message = torch.frombuffer(bytearray(pickle.dumps(LocalState(pieces, held.numbers))), dtype=torch.uint8)
    comm.send(torch.tensor([len(message)]), to, STATE)
    comm.send(message, to, STATE)


def receive_held(comm: Communicator, source: int) -> LocalState:
    """Receive what `send_held` sends."""
    length = torch.zeros(1, dtype=torch.int64)
    comm.recv(length, source, STATE)
    message = torch.zeros(int(length), dtype=torch.uint8)
    comm.recv(message, source, STATE)
    return cast("LocalState", pickle.loads(message.numpy().data))
