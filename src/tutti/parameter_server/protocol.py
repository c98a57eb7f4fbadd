"""The messages between workers and servers.

    worker                                   server
      │ request: what, again, settings ────────▶ │   REQUEST
      │ its slice of each vector ──────────────▶ │   BODY + number of the vector     (push, exchange,
      │                                          │                                   start, overwrite)
      │ its slice of the weights at which that   │
      │ was computed, if the rule compares ────▶ │   likewise                        (push, exchange)
      │ ◀──── version, staleness, dropped answer │   ANSWER
      │ ◀─────────────── its slice of each vector │   WEIGHTS + number of the vector  (pull, exchange, read,
      │                                          │                                   tick)

Messages to one rank with one tag keep their order, so a server that has a request knows whose body is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from tutti.comm.base import Communicator

REQUEST: Final = 1 << 21
ANSWER: Final = REQUEST + 1
BODY: Final = REQUEST + 1000
WEIGHTS: Final = REQUEST + 2000


class Request(IntEnum):
    """A worker's request."""

    START = 0
    PUSH = 1
    EXCHANGE = 2
    PULL = 3
    READ = 4
    TICK = 5
    LEAVE = 6
    REJOIN = 7
    CLOSE = 8
    OVERWRITE = 9


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
