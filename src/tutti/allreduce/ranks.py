"""The communicator as an all-reduce algorithm sees it, parts of one, and the count of what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

TAG: Final = 23
"""The tag of the algorithms' messages."""


class Ranks(Protocol):
    """Some ranks that send vectors to each other; see `tutti.comm.base.Messages`."""

    @property
    def rank(self) -> int:
        """The number of this process, 0 to size - 1."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`."""

    def recv(self, vector: Tensor, source: int, tag: int = 0) -> int:
        """Overwrite `vector` with the next message from `source`; returns the sender's rank."""

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> object:
        """Send one vector and receive another at the same time."""


class Hosts(Ranks, Protocol):
    """Ranks that know which of them share a host; every communicator is one."""

    @property
    def hosts(self) -> int:
        """The number of hosts that the ranks are on."""

    @property
    def node(self) -> Hosts:
        """The ranks of this host."""

    @property
    def cross(self) -> Hosts | None:
        """The ranks with this local rank on every host; None where some host has no such local rank."""


AllReduce = Callable[[Hosts, Tensor], None]
"""Overwrites a vector on every rank with the sum over the ranks; bit-equal on all of them."""


class RankSubset:
    """Some ranks of a larger group, numbered anew in the order in which they are given.

    Args:
        whole: the larger group.
        members: their ranks there; this process's own is one of them.
    """

    def __init__(self, whole: Ranks, members: Sequence[int]) -> None:
        self._whole, self._members = whole, members
        self.rank, self.size = members.index(whole.rank), len(members)

    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`."""
        self._whole.send(vector, self._members[to], tag)

    def recv(self, vector: Tensor, source: int, tag: int = 0) -> int:
        """Overwrite `vector` with the next message from `source`; returns that."""
        self._whole.recv(vector, self._members[source], tag)
        return source

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        """Send one vector and receive another at the same time."""
        self._whole.exchange(outgoing, self._members[to], incoming, self._members[source], tag)


@dataclass
class Sent:
    """Counts of what one rank has sent.

    Attributes:
        steps: how often it sent, received, or did both at once.
        nbytes: the bytes of its messages.
    """

    steps: int = 0
    nbytes: int = 0


class Counted:
    """A communicator whose messages are counted, those to the own host and to other hosts too.

    Args:
        comm: what carries the messages.
        sent: where they are counted; by default from 0.

    Attributes:
        sent: the counts.
    """

    def __init__(self, comm: Hosts, sent: Sent | None = None) -> None:
        self._comm, self.sent = comm, Sent() if sent is None else sent
        self.rank, self.size, self.hosts = comm.rank, comm.size, comm.hosts

    @property
    def node(self) -> Counted:
        """The ranks of this host."""
        return Counted(self._comm.node, self.sent)

    @property
    def cross(self) -> Counted | None:
        """The ranks with this local rank on every host; None where some host has no such local rank."""
        cross = self._comm.cross
        return None if cross is None else Counted(cross, self.sent)

    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`."""
        self._count(vector.nbytes)
        self._comm.send(vector, to, tag)

    def recv(self, vector: Tensor, source: int, tag: int = 0) -> int:
        """Overwrite `vector` with the next message from `source`; returns the sender's rank."""
        self._count(0)
        return self._comm.recv(vector, source, tag)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        """Send one vector and receive another at the same time."""
        self._count(outgoing.nbytes)
        self._comm.exchange(outgoing, to, incoming, source, tag)

    def _count(self, nbytes: int) -> None:
        self.sent.steps += 1
        self.sent.nbytes += nbytes
