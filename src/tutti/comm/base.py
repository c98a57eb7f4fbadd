"""What a communicator can do: the contract that strategies and training see. Backends lie beside this file.

Vectors are one-dimensional, contiguous CPU tensors; every rank passes the same length and dtype. Collectives are
called by all ranks of a communicator in the same order. Any operation may raise `PeerLost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor

ANY: Final = -1
"""A `source` that stands for every rank."""


class Collectives(ABC):
    """Operations that all ranks take part in."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come here."""

    @abstractmethod
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        """Overwrite `vector` on every rank with that of rank `root`."""

    @abstractmethod
    def all_reduce(self, vector: Tensor) -> None:
        """Overwrite `vector` on every rank with the sum over the ranks; bit-equal on all of them."""

    @abstractmethod
    def reduce_scatter(self, vector: Tensor) -> None:
        """Overwrite this rank's slice of `vector`, `cut(len(vector), size)[rank]`, with the sum over the ranks.

        The rest of `vector` is left as it was.
        """

    @abstractmethod
    def all_gather(self, vector: Tensor) -> None:
        """Every rank owns its slice, `cut(len(vector), size)[rank]`; fill in the others' slices."""

    @abstractmethod
    def broadcast_object(self, value: object, root: int = 0) -> object:
        """The picklable `value` of rank `root`, on every rank."""

    @abstractmethod
    def all_gather_objects(self, value: object) -> list[object]:
        """The picklable values of all ranks, in rank order, on every rank."""


class Messages(ABC):
    """Vectors from one rank to another."""

    @abstractmethod
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`; returns when it may be overwritten. Messages to one rank with one tag keep their order."""

    @abstractmethod
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        """Overwrite `vector` with the next message from `source`; returns the sender's rank.

        With `source=ANY`, first come, first served. Waiting costs no core.
        """


class Counter(ABC):
    """An integer that all ranks see, such as the head of a work queue."""

    @abstractmethod
    def add(self, amount: int = 1) -> int:
        """Add `amount` in one indivisible operation; returns the value from before."""


class SharedMemory(ABC):
    """Memory that the ranks of one host see, and locks on it."""

    @abstractmethod
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros that every rank of this host sees (collective over the host's ranks)."""

    @abstractmethod
    def counter(self) -> Counter:
        """A counter at zero that every rank of the communicator sees (collective over all ranks)."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """A lock for the ranks of this host (collective over the host's ranks); a dead owner frees it."""


class Communicator(Collectives, Messages, SharedMemory):
    """A group of ranks, and how vectors travel between them.

    Attributes:
        rank: this process's number in the group, 0 to size - 1.
        size: how many ranks there are (the world size).
        hosts: how many hosts they are on.
    """

    rank: int
    size: int
    hosts: int

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
        """One communicator for all ranks that give the same `color`, ordered by (key, rank).

        Collective; a rank whose color is None belongs to none.
        """

    @abstractmethod
    def clock(self) -> float:
        """Seconds since some fixed moment: real time, or the virtual clock."""

    @abstractmethod
    def compute(self, seconds: float) -> None:
        """Charge `seconds` of computing to the virtual clock; real communicators do nothing."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this communicator holds. No operation may follow."""


def cut(length: int, parts: int) -> list[slice]:
    """Cut `range(length)` into `parts` consecutive slices whose lengths differ by at most one (longer ones first)."""
    base, longer = divmod(length, parts)
    edges = [i * base + min(i, longer) for i in range(parts + 1)]
    return [slice(edges[i], edges[i + 1]) for i in range(parts)]
