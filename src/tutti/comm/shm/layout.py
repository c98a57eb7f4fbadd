"""The places of a host communicator's control words and buffers in the arena; the supervisor reads it.

    block ┌────────────────┐
          │ header line    │  who is lost
          ├────────────────┤
          │ line of rank 0 │  phases, calls, process id, left: written by that rank only
          │ line of rank 1 │
          ├────────────────┤
          │ rings' lines   │  bytes sent, bytes received of each pair, each in its own line
          ├────────────────┤
          │ rows           │  two sets of one per rank: what collectives pass on
          ├────────────────┤
          │ rings          │  one for each (receiver, sender): what messages pass on
          └────────────────┘

Every word has one writer, except `LOST`. A line is a cache line: two ranks that store in one
line would take it from each other's caches at each store, although they mean different words (false sharing).
Rows and rings take no memory before they are first used. `barrier` and `rings` say in which order the words
are stored and loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tutti.comm.shm.arena import PAGE, Arena

LINE: Final = 8
"""Words in a cache line."""

LOST: Final = 0
"""Word of the header line: 0, or 1 + the rank that was found dead first.

-(1 + rank) is a rank of another host, numbered in the whole job. Two processes that find 0 at the same time
may both store: either rank is dead, and it only matters that the word stays other than 0.
"""

PHASE, CALL, PID, LEFT, STEPS, WAITS = 0, 2, 4, 5, 6, 7
"""Words of a rank's line.

PHASE: twice the number of its latest phase of the barrier, plus 1 if the call is more than a barrier.
CALL: the packed call.
PID: the process id.
LEFT: 1 after `close`.
STEPS: 1 + its steps while it trains; with `FIRST_STEP` until its first step is done. Else below 0: its phase,
by `MOST_PHASES`, and its signs of life; 0 before it has published any.
WAITS: 1 after it has waited for others for about 10 ms.

PHASE and CALL have two words each, for even and odd phases: a slow rank still finds the call of a rank that
has gone on."""

FIRST_STEP: Final = 1 << 62
"""The bit of STEPS of a rank that is in its first step in this process."""

MOST_PHASES: Final = 16
"""-STEPS of a rank that does not train is 1 + the number of its phase + `MOST_PHASES` * its signs of life."""

ROW: Final = 1 << 20
"""Bytes of a row; longer vectors pass in pieces, which stay in the caches."""

RING: Final = 256 << 10
"""Bytes of a ring of messages, a multiple of a header; longer messages pass in pieces."""


@dataclass(frozen=True)
class ControlLayout:
    """The word numbers, and the offsets in bytes from the block's beginning, for `size` ranks."""

    size: int

    def line(self, rank: int) -> int:
        """Return the first word of a rank's line."""
        return LINE * (1 + rank)

    def sent(self, sender: int, receiver: int) -> int:
        """Return the word that counts the bytes that the sender has put into the ring."""
        return LINE * (1 + self.size + 2 * (receiver * self.size + sender))

    def received(self, sender: int, receiver: int) -> int:
        """Return the word that counts the bytes that the receiver has taken out of the ring."""
        return self.sent(sender, receiver) + LINE

    @property
    def words(self) -> int:
        """The number of control words."""
        return LINE * (1 + self.size + 2 * self.size * self.size)

    @property
    def rows(self) -> int:
        """The offset of the rows: (2, size, ROW) bytes."""
        # Rounded up to a page: -(-a // b) is a / b rounded up.
        return -(-self.words * 8 // PAGE) * PAGE

    def ring(self, sender: int, receiver: int) -> int:
        """Return the offset of a ring."""
        return self.rows + 2 * self.size * ROW + (receiver * self.size + sender) * RING

    @property
    def nbytes(self) -> int:
        """The length of the whole block."""
        # Where the ring after the last one would begin.
        return self.ring(0, self.size)


class HostGroup:
    """A group of ranks of one host, as one of them sees it."""

    def __init__(self, arena: Arena, block: int, rank: int, global_ranks: Iterable[int]) -> None:
        self.arena, self.block, self.rank = arena, block, rank
        self.global_ranks = tuple(global_ranks)
        self.size = len(self.global_ranks)
        self.layout = ControlLayout(self.size)
        self.words = arena.words(block, self.layout.words)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left in an orderly way."""
        return bool(self.words[self.layout.line(rank) + LEFT])

    def all_have_left(self) -> bool:
        """Return whether all ranks have left."""
        return all(map(self.has_left, range(self.size)))

    def leave(self) -> None:
        """Record that this rank has left."""
        self.words[self.layout.line(self.rank) + LEFT] = 1


def control_bytes(size: int) -> int:
    """Return the bytes of the arena that a communicator of `size` ranks needs."""
    return ControlLayout(size).nbytes
