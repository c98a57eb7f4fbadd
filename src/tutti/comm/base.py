"""The contract of communicators that strategies and training see; `shm`, `mpi` and `virtual` implement it.

Vectors are one-dimensional, contiguous CPU tensors; every rank passes the same length and dtype. All ranks of
a communicator call its collectives in the same order. Any operation may raise `PeerLost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

ANY: Final = -1
"""A `source` that stands for every rank."""


class Counter(ABC):
    """An integer that all ranks see, such as the head of a work queue."""

    @abstractmethod
    def add(self, amount: int = 1) -> int:
        """Add `amount` in one indivisible operation; return the previous value."""


class Communicator(ABC):
    """A group of ranks, and the transfer of vectors between them.

    Attributes:
        rank: this process's number in the group, 0 to size - 1.
        size: the number of ranks (the world size).
        hosts: the number of hosts.
        servers: further ranks that are kept for parameter centres; None: there are none.
        in_backward: whether operations may be called while autograd computes gradients.
        adding_s_per_byte: seconds that the virtual clock charges for adding a byte.
    """

    rank: int
    size: int
    hosts: int
    in_backward: bool = True
    adding_s_per_byte: float = 0.0
    servers: Servers | None = None

    # --- collectives: all ranks take part

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        """Overwrite `vector` on every rank with rank `root`'s."""

    @abstractmethod
    def all_reduce(self, vector: Tensor) -> None:
        """Overwrite `vector` on every rank with the sum over the ranks; bit-equal on all of them."""

    @abstractmethod
    def reduce_scatter(self, vector: Tensor) -> None:
        """Overwrite this rank's slice, `cut(len(vector), size)[rank]`, with the sum over the ranks.

        The rest of `vector` is left as it was.
        """

    @abstractmethod
    def all_gather(self, vector: Tensor) -> None:
        """Fill in the other ranks' slices; each rank owns `cut(len(vector), size)[rank]`."""

    @abstractmethod
    def broadcast_object(self, value: object, root: int = 0) -> object:
        """Return rank `root`'s picklable `value` on every rank."""

    @abstractmethod
    def all_gather_objects(self, value: object) -> list[object]:
        """Return the picklable values of all ranks, in rank order, on every rank."""

    # --- messages from one rank to another

    @abstractmethod
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`, and return when it may be overwritten.

        Messages to one rank with one tag keep their order.
        """

    @abstractmethod
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        """Overwrite `vector` with the next message from `source`, and return the sender's rank.

        With `source=ANY`, first come, first served. Waiting costs no core.

        Raises:
            ValueError: the message differs from `vector` in length or dtype. It stays there.
        """

    @abstractmethod
    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        """Send `outgoing` to rank `to` while `incoming` is overwritten with the next message from `source`.

        Both happen at the same time: ranks that all exchange in a ring, or in pairs, never deadlock, however
        long the vectors are. The two may differ in length and dtype, but not overlap in memory. The other
        side may `exchange`, or `send` and `recv`.

        Raises:
            ValueError: the message differs from `incoming` in length or dtype. `outgoing` is sent then.
        """

    @abstractmethod
    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        """Return the sender of an unread message with this tag, or None, without waiting.

        `recv` from that rank with that tag gets the message. An earlier message may still be under way.
        """

    # --- memory that the ranks of one host see, and locks on it

    @abstractmethod
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of zeros that every rank of this host sees (collective over the host's ranks)."""

    @abstractmethod
    def counter(self) -> Counter:
        """Return a counter at zero that every rank of the communicator sees (collective over all ranks)."""

    @abstractmethod
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        """Return locks for the ranks of this host (collective over them); a dead owner frees its own."""

    def lock(self) -> AbstractContextManager[None]:
        """Return a lock for the ranks of this host (collective over them); a dead owner frees it."""
        return self.locks(1)[0]

    # --- groups, time, the end

    @property
    @abstractmethod
    def node(self) -> Communicator:
        """The ranks of this host."""

    @property
    @abstractmethod
    def cross(self) -> Communicator | None:
        """The ranks with this local rank on every host; None where some host has no such local rank."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return one communicator for all ranks with the same `color`, ordered by (key, rank).

        Collective; a rank whose color is None gets None.
        """

    @abstractmethod
    def clock(self) -> float:
        """Return the seconds since some fixed moment: real time, or the virtual clock."""

    @abstractmethod
    def compute(self, seconds: float) -> None:
        """Charge `seconds` of computing to the virtual clock; real communicators do nothing."""

    def note_progress(self) -> None:
        """Give a sign of life, before each batch of an evaluation: a silent rank may hang."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the communicator's resources. No operation may follow."""

    def _check(self, vector: Tensor) -> None:
        if vector.dim() != 1 or not vector.is_contiguous() or not vector.is_cpu:
            raise ValueError(
                f"a vector must be one-dimensional, contiguous and on the CPU; this one has shape "
                f"{tuple(vector.shape)}, strides {vector.stride()} and is on {vector.device}; "
                f"flatten it: vector.contiguous().view(-1)"
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            last = self.size - 1
            raise ValueError(
                f"there is no rank {rank} in a communicator of size {self.size}; expected 0 to {last}"
            )


SERVER_PERIOD: Final = 10
"""The default of `Servers.server_period`."""


@dataclass(frozen=True)
class Servers:
    """Ranks that are kept for parameter centres, and the workers' way to them."""

    comm: Communicator  # the workers, in their order, and after them the servers
    ranks: tuple[int, ...]  # the servers, numbered in `comm`
    levels: int = 1  # 1: workers talk to the servers; 2: to a centre on their host, and that to the servers
    # with two levels, exchanges of a host's workers with its centre per exchange of this with the servers
    server_period: int = SERVER_PERIOD

    @property
    def serving(self) -> bool:
        """True on the servers."""
        return self.comm.rank in self.ranks


def keep_servers(
    comm: Communicator, servers: int, levels: int = 1, server_period: int | None = None
) -> Communicator:
    """Keep the last `servers` ranks of a job for parameter centres (collective); the others are workers.

    Return the communicator of the workers on a worker, and of the servers on a server; `comm` if there are no
    servers.
    """
    if not servers:
        return comm
    workers = comm.size - servers
    if workers < 1:
        raise ValueError(f"cannot keep {servers} of {comm.size} ranks as servers: no rank is left to work")
    part = comm.split(int(comm.rank >= workers))
    assert part is not None, "every rank gave a color"
    part.servers = Servers(comm, tuple(range(workers, comm.size)), levels, server_period or SERVER_PERIOD)
    return part


@dataclass(frozen=True)
class Group:
    """The ranks of one worker, where workers have several, and this rank's counterparts."""

    ranks: Communicator  # the ranks of this worker, all on one host
    lane: Communicator  # the ranks with this one's place in each worker, in the order of the workers

    @classmethod
    def of(cls, comm: Communicator, size: int) -> Group:
        """Cut the ranks of each host into groups of `size`, which divides their number (collective)."""
        first = cast("int", comm.node.broadcast_object(comm.rank))
        number = first + comm.node.rank // size * comm.size
        ranks = comm.split(number)
        assert ranks is not None, "every rank is in a group"
        lane = comm.split(ranks.rank, key=number)
        assert lane is not None, "every rank has a place in its group"
        return cls(ranks, lane)

    def close(self) -> None:
        """Leave both communicators."""
        self.ranks.close()
        self.lane.close()


def by_color(choices: Sequence[tuple[int | None, int]]) -> dict[int | None, list[int]]:
    """Return the ranks of each part of a `split` in its order, by color; the ranks chose (color, key)."""
    parts: dict[int | None, list[int]] = {}
    for rank in sorted(range(len(choices)), key=lambda rank: (choices[rank][1], rank)):
        parts.setdefault(choices[rank][0], []).append(rank)
    return parts


def cut(length: int, parts: int) -> list[slice]:
    """Cut `range(length)` into `parts` consecutive slices; the first ones may be longer, by one."""
    base, longer = divmod(length, parts)
    edges = [i * base + min(i, longer) for i in range(parts + 1)]
    return [slice(edges[i], edges[i + 1]) for i in range(parts)]
