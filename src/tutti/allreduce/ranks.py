"""Ranks as an all-reduce algorithm sees them, and the count of what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from tutti.comm.base import Communicator

TAG: Final = 23
"""The tag of the algorithms' messages."""


@dataclass
class Sent:
    """The number of this rank's messages (sent, received or exchanged), and the bytes sent."""

    steps: int = 0
    nbytes: int = 0


class Ranks:
    """Some ranks of a communicator that send vectors to each other, numbered in the order of `members`."""

    def __init__(
        self, comm: Communicator, members: Sequence[int] | None = None, sent: Sent | None = None
    ) -> None:
        self._comm, self._members = comm, range(comm.size) if members is None else members
        self.rank, self.size, self.hosts = self._members.index(comm.rank), len(self._members), comm.hosts
        self.sent = Sent() if sent is None else sent

    def subset(self, members: Sequence[int]) -> Ranks:
        """Return some of the ranks, including this one."""
        return Ranks(self._comm, members, self.sent)

    @property
    def node(self) -> Ranks:
        """The ranks of this host."""
        return Ranks(self._comm.node, sent=self.sent)

    @property
    def cross(self) -> Ranks | None:
        """The ranks with this local rank on every host; None where some host has no such local rank."""
        cross = self._comm.cross
        return None if cross is None else Ranks(cross, sent=self.sent)

    def send(self, vector: Tensor, to: int) -> None:
        """Send `vector`."""
        self._count(vector.nbytes)
        self._comm.send(vector, self._members[to], TAG)

    def recv(self, vector: Tensor, source: int) -> None:
        """Overwrite `vector` with the next message from `source`."""
        self._count(0)
        self._comm.recv(vector, self._members[source], TAG)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """Send one vector and receive another at the same time."""
        self._count(outgoing.nbytes)
        self._comm.exchange(outgoing, self._members[to], incoming, self._members[source], TAG)

    def add(self, incoming: Tensor, total: Tensor) -> None:
        """Add `incoming` to `total`, and charge the time of the network's model."""
        total.add_(incoming)
        if self._comm.adding_s_per_byte:
            self._comm.compute(incoming.nbytes * self._comm.adding_s_per_byte)

    def _count(self, nbytes: int) -> None:
        self.sent.steps += 1
        self.sent.nbytes += nbytes


AllReduce = Callable[[Ranks, Tensor], None]
"""Overwrites a vector on every rank with the sum over the ranks; bit-equal on all of them.

There may be any number of ranks; the vector has the same length, any, and dtype on all of them.
"""
