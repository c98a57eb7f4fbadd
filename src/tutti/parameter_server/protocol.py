"""The messages between workers and servers.

    worker                                   server
      │ request: what, again, settings ────────▶ │   REQUEST
      │ its slice of each vector ──────────────▶ │   BODY + number of the vector     (push, exchange,
      │                                          │                                   start, overwrite)
      │ its slice of the weights at which that   │
      │ was computed, if the rule compares ────▶ │   likewise                        (push, exchange)
      │ what the rule has kept ────────────────▶ │   STATE                           (start, restore)
      │ ◀──── version, staleness, dropped answer │   ANSWER                          (all but state)
      │ ◀─────────────── its slice of each vector │   WEIGHTS + number of the vector  (pull, exchange, read,
      │                                          │                                   tick)
      │ ◀────────────────── what the rule keeps │   STATE                           (state)

Messages to one rank with one tag keep their order, so a server that has a request knows whose body is next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.state import Held, TensorPiece

REQUEST: Final = 1 << 21
ANSWER: Final = REQUEST + 1
BODY: Final = REQUEST + 1000
STATE: Final = REQUEST + 2
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
    STATE = 10
    RESTORE = 11
    RECALL = 12


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


def send_held(comm: Communicator, held: Held, to: int) -> None:
    """Send what belongs to parameters: a description, and then the bytes of each piece."""
    pieces = [
        [one.name, one.start, len(one.values), str(one.values.dtype), one.shape, one.order]
        for one in held.pieces
    ]
    description = json.dumps([pieces, held.numbers]).encode()
    comm.send(torch.tensor([len(description)]), to, STATE)
    comm.send(torch.frombuffer(bytearray(description), dtype=torch.uint8), to, STATE)
    for one in held.pieces:
        if len(one.values):
            comm.send(one.values.view(torch.uint8), to, STATE)


def receive_held(comm: Communicator, source: int) -> Held:
    """Receive what `send_held` sends."""
    length = torch.zeros(1, dtype=torch.int64)
    comm.recv(length, source, STATE)
    description = torch.zeros(int(length), dtype=torch.uint8)
    comm.recv(description, source, STATE)
    pieces, numbers = json.loads(bytes(description.tolist()))
    held = Held(numbers=numbers)
    for name, start, count, dtype, shape, order in pieces:
        values = torch.zeros(count, dtype=getattr(torch, dtype.removeprefix("torch.")))
        if count:
            comm.recv(values.view(torch.uint8), source, STATE)
        held.pieces.append(TensorPiece(name, start, values, tuple(shape), order))
    return held
