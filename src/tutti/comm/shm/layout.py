"""Where a host communicator's control words and buffers lie in the arena. Free of torch, for the supervisor.

    block ┌────────────────┐
          │ header line    │  who is lost
          ├────────────────┤
          │ line of rank 0 │  latest meeting, process id, ...: written by that rank alone
          │ line of rank 1 │
          ├────────────────┤
          │ rings' lines   │  how far sender and receiver of each pair are, each in a line of its own
          ├────────────────┤
          │ rows           │  two sets of one per rank: what collectives pass on
          ├────────────────┤
          │ rings          │  one for each (receiver, sender): what messages pass on
          └────────────────┘

A line is a cache line, so that ranks that write do not disturb each other. Nothing of rows and rings takes
memory before it is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tutti.comm.shm.arena import PAGE

LINE: Final = 8
"""Words in a cache line."""

LOST: Final = 0
"""Word of the header line: 0, or 1 + the rank that was found dead first. The supervisor may set it too.

-(1 + rank) is a rank of another host, numbered in the whole job.
"""

MEETING, CALLS, PID, LEFT = 0, 2, 4, 5
"""Words of a rank's line: twice the number of its latest meeting with the others, plus 1 if it has come for
more than a barrier; what it has come for, then; process id; 1 after `close`. The first two are two words
each, used in turn: who is late still finds what the others said before they went on."""

ROW: Final = 1 << 20
"""Bytes of a row: longer vectors travel in pieces, which stay in the caches."""

RING: Final = 256 << 10
"""Bytes of a ring of messages: longer ones travel in pieces."""


@dataclass(frozen=True)
class ControlLayout:
    """The word numbers, and the offsets in bytes from the block's beginning, for `size` ranks."""

    size: int

    def line(self, rank: int) -> int:
        """The first word of a rank's line."""
        return LINE * (1 + rank)

    def sent(self, sender: int, receiver: int) -> int:
        """The word that counts the bytes that the sender has put into the ring."""
        return LINE * (1 + self.size + 2 * (receiver * self.size + sender))

    def received(self, sender: int, receiver: int) -> int:
        """The word that counts the bytes that the receiver has taken out of the ring."""
        return self.sent(sender, receiver) + LINE

    @property
    def words(self) -> int:
        """How many control words there are."""
        return LINE * (1 + self.size + 2 * self.size * self.size)

    @property
    def rows(self) -> int:
        """Where the rows begin: (2, size, ROW) bytes."""
        return -(-self.words * 8 // PAGE) * PAGE

    def ring(self, sender: int, receiver: int) -> int:
        """Where a ring begins."""
        return self.rows + 2 * self.size * ROW + (receiver * self.size + sender) * RING

    @property
    def nbytes(self) -> int:
        """How much the whole block needs."""
        return self.ring(0, self.size)


def control_bytes(size: int) -> int:
    """How many bytes of the arena a communicator of `size` ranks needs; what the supervisor allocates."""
    return ControlLayout(size).nbytes
