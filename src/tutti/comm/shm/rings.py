"""Messages between the processes of one host: a ring of bytes in the arena for each (sender, receiver).

    ring   ░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░      header (32 bytes) body header body ...
                 ^received     ^sent           both only grow: places are modulo the length

Only the sender writes `sent` and only the receiver writes `received`, so no lock is needed. A body that is
longer than the ring passes through it in pieces.

    sender     [1] load `received`: any room?   [2] store the bytes ─ fence ─ [3] store `sent`
    receiver   [4] load `sent`: any bytes? ─ fence ─ [5] load the bytes ─ fence ─ [6] store `received`

- [2] is seen before [3], and [4] comes before [5]: who sees the count finds the bytes that it counts.
- [5] comes before [6], and [1] before [2]: who sees that there is room overwrites only what has been read.
  The latter needs no fence: whether and where [2] stores depends on what [1] has loaded, and no processor
  lets others see a store before it is certain.

x86 keeps all of these orders (TSO), and no `fence` is called there. Nothing rests on the order
of a store and a later load of another word: both sides look again and again, so that a count which is seen
late costs time only. Counts do not overflow: 2^63 bytes at 10 GB/s are 29 years.

Every count stays a multiple of HEADER, which divides PIECE and RING: a body is cut at such multiples and its
end is rounded up. So a header never wraps round the end of the ring, and there is room for the padding
wherever there is room for the bytes before it.

Source: Lamport 1977, "Proving the correctness of multiprocess programs", IEEE Transactions on Software
Engineering 3 (the queue of one writer and one reader). `tests/comm/interleavings.py` tries every order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tutti.comm.shm.fence import ORDERED, fence
from tutti.comm.shm.layout import RING, HostGroup

HEADER: Final = 32
"""Bytes of a header: tag, when it was sent, dtype and length of the body."""

PIECE: Final = RING // 4
"""A sender makes a long body known piece by piece, so that the receiver can begin before it ends."""

DTYPES: Final = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""All dtypes; a header names one by its place in this list."""

DTYPE_NUMBERS: Final = {dtype: number for number, dtype in enumerate(DTYPES)}


def as_bytes(vector: Tensor) -> Tensor:
    """Return the bytes of a vector, as a view."""
    return vector.view(torch.uint8) if vector.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(eq=False)
class Arrival:
    """A message whose header has been read."""

    tag: int
    stamp: int  # the time at which it was sent; all processes of the host have the same clock
    dtype: torch.dtype  # of its elements
    nbytes: int  # of its body
    body: Tensor | None = None  # its destination; None while it is still in the ring
    filled: int = 0  # the bytes of the body that have been taken out of the ring

    @property
    def complete(self) -> bool:
        """True when all of the body is out of the ring."""
        return self.body is not None and self.filled == self.nbytes

    def fits(self, vector: Tensor) -> bool:
        """Return whether `vector` can receive it."""
        return self.nbytes == vector.nbytes and self.dtype == vector.dtype

    def __str__(self) -> str:
        return f"{self.nbytes // self.dtype.itemsize} elements of {self.dtype}"


class _Ring:
    """A ring, as both its ends see it."""

    def __init__(self, group: HostGroup, sender: int, receiver: int) -> None:
        layout = group.layout
        self.sender, self.words = sender, group.words
        self.sent, self.received = layout.sent(sender, receiver), layout.received(sender, receiver)
        self.headers = group.arena.words(group.block + layout.ring(sender, receiver), RING // 8)
        self.bytes = torch.frombuffer(self.headers, dtype=torch.uint8)


class Outbox(_Ring):
    """The sender's end of a ring."""

    @property
    def room(self) -> int:
        """The bytes that can be put in now: [1]."""
        return RING - (self.words[self.sent] - self.words[self.received])

    def begin(self, tag: int, vector: Tensor) -> None:
        """Put the header of a message in; there must be room for it."""
        sent = self.words[self.sent]
        at = sent % RING // 8
        self.headers[at], self.headers[at + 1] = tag, time.monotonic_ns()  # [2]
        self.headers[at + 2], self.headers[at + 3] = DTYPE_NUMBERS[vector.dtype], vector.nbytes
        if not ORDERED:
            fence()
        self.words[self.sent] = sent + HEADER  # [3]

    def put(self, body: Tensor, done: int) -> int:
        """Put in as much of `body` as there is room for, from byte `done` on; return the new `done`."""
        sent = self.words[self.sent]
        at = sent % RING
        count = min(self.room, len(body) - done, RING - at, PIECE)
        self.bytes[at : at + count].copy_(body[done : done + count])  # [2]
        done += count
        # -n % m is what is missing from n to the next multiple of m.
        padding = -done % HEADER if done == len(body) else 0
        if not ORDERED:
            fence()
        self.words[self.sent] = sent + count + padding  # [3]
        return done


class Inbox(_Ring):
    """The receiver's end of a ring, and the messages taken out of it while another was sought."""

    def __init__(self, group: HostGroup, sender: int, receiver: int) -> None:
        super().__init__(group, sender, receiver)
        self._waiting: deque[Arrival] = deque()

    def find(self, tag: int) -> Arrival | None:
        """Return the oldest message with this tag whose header is here, or None."""
        for arrival in self._waiting:
            if arrival.tag == tag:
                return arrival
        while (next_one := self._read_header()) is not None:
            if next_one.tag == tag:
                return next_one
        return None

    def absorb(self) -> None:
        """Take everything out of the ring, so that its sender can continue."""
        while self._read_header() is not None:
            pass

    def deliver(self, tag: int, vector: Tensor) -> None:
        """Leave a copy of a vector here: how a rank sends to itself."""
        body = as_bytes(vector.clone())
        self._waiting.append(Arrival(tag, time.monotonic_ns(), vector.dtype, len(body), body, len(body)))

    def move(self, arrival: Arrival, body: Tensor) -> bool:
        """Move a message's body on, to `body` unless it goes elsewhere; return whether it is complete."""
        if arrival.body is None:
            arrival.body = body
        self._pump(arrival)
        return arrival.complete

    def finish(self, arrival: Arrival, body: Tensor) -> None:
        """Ensure that a complete message's body is in `body`, and forget the message."""
        if arrival.body is not None and arrival.body is not body:
            body.copy_(arrival.body)
        self._waiting.remove(arrival)

    def _read_header(self) -> Arrival | None:
        """Return the next message in the ring, after moving out what has arrived of those before it."""
        if self._waiting and not self._waiting[-1].complete:
            last = self._waiting[-1]
            if last.body is None:
                last.body = torch.empty(last.nbytes, dtype=torch.uint8, device="cpu")
            self._pump(last)
            if not last.complete:
                return None
        received = self.words[self.received]
        if self.words[self.sent] - received < HEADER:  # [4]
            return None
        if not ORDERED:
            fence()
        at = received % RING // 8
        tag, stamp, dtype, nbytes = self.headers[at : at + 4]  # [5]
        if not ORDERED:
            fence()
        self.words[self.received] = received + HEADER  # [6]
        arrival = Arrival(tag, stamp, DTYPES[dtype], nbytes)
        self._waiting.append(arrival)
        return arrival

    def _pump(self, arrival: Arrival) -> None:
        """Move what has arrived of the body, which is the next in the ring."""
        assert arrival.body is not None
        while arrival.filled < arrival.nbytes:
            received = self.words[self.received]
            at = received % RING
            # [4] What follows the body in the ring, and its padding, are left for the next message.
            count = min(self.words[self.sent] - received, arrival.nbytes - arrival.filled, RING - at)
            if not count:
                return
            if not ORDERED:
                fence()
            arrival.body[arrival.filled : arrival.filled + count].copy_(self.bytes[at : at + count])  # [5]
            arrival.filled += count
            padding = -arrival.nbytes % HEADER if arrival.filled == arrival.nbytes else 0
            if not ORDERED:
                fence()
            self.words[self.received] = received + count + padding  # [6]
