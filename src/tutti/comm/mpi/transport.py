"""Vectors and messages between the ranks of a group on several hosts, over MPI.

Operations are generators that never block: requests are begun, and tested whenever the generator runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy
from torch import Tensor

from tutti.comm.base import ANY
from tutti.comm.mpi.group import Membership
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.point_to_point import Receiving
from tutti.comm.shm.rings import as_bytes
from tutti.errors import CallsDiffer, UserError

VECTORS: Final = 1
"""The tag, on the communicator for collectives, of vectors."""

Request = tuple[int, Any]
"""A rank of the group, and MPI's request for a message to it or from it."""


class MpiRequests:
    """The vectors between one rank of a group and others."""

    def __init__(self, membership: Membership, comm: Any) -> None:
        self._membership, self._comm = membership, comm
        self._pending: list[Request] = []

    @property
    def awaited(self) -> list[int]:
        """The ranks whose vectors this rank waits for, or that must take its own."""
        return sorted({rank for rank, _ in self._pending})

    def send(self, array: numpy.ndarray[Any, Any], to: int, tag: int = VECTORS) -> Request:
        """Begin to send an array, which stays as it is until that is finished."""
        return to, self._comm.Isend(array, to, tag)

    def recv(self, array: numpy.ndarray[Any, Any], source: int, tag: int = VECTORS) -> Request:
        """Begin to receive an array; a shorter one may come."""
        return source, self._comm.Irecv(array, source, tag)

    def finish(self, requests: Sequence[Request]) -> Steps:
        """Wait for requests."""
        self._pending = list(requests)
        try:
            while self._pending:
                before = len(self._pending)
                self._pending = [one for one in self._pending if not one[1].Test()]
                if self._pending:
                    yield len(self._pending) < before
        finally:
            # MPI may still write into the memory of requests that are given up.
            self._membership.abandon([request for _, request in self._pending])
            self._pending = []

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Steps:
        """Send vectors to some ranks, and receive them from some; empty ones do not travel."""
        yield from self.finish(self.begin(outgoing, incoming))

    def begin(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[Request]:
        """Begin an `exchange`, its sends first.

        A long vector travels once its receiver has answered. The answer to a send that comes after a receive
        would wait behind the whole vector of the other direction, in the same TCP stream.
        """
        going = [self.send(_array(vector), rank) for rank, vector in outgoing.items() if len(vector)]
        return going + [self.recv(_array(vector), rank) for rank, vector in incoming.items() if len(vector)]


class MpiMessages:
    """The messages that one rank of a group sends and receives."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._mpi = membership, membership.mpi
        self._receiving: list[Receiving] = []

    def send(self, vector: Tensor, to: int, tag: int) -> Steps:
        """Send `vector`; it may be overwritten at the end. Messages to one rank keep their order."""
        self._check_tag(tag)
        # Messages run concurrently: each has its own pending requests.
        requests = MpiRequests(self._membership, self._mpi.messages)
        yield from requests.finish([requests.send(_array(vector), to, tag)])

    def recv(self, vector: Tensor, receiving: Receiving) -> Steps:
        """Overwrite `vector` with the message that `receiving` asks for; CallsDiffer if lengths differ."""
        self._check_tag(receiving.tag)
        self._receiving.append(receiving)
        try:
            while (found := self.find(receiving)) is None:
                yield False
            if found != vector.nbytes:
                names = self._membership.global_ranks
                raise CallsDiffer(
                    f"rank {names[receiving.sender]} sent {found // vector.itemsize} elements of "
                    f"{vector.dtype} with tag {receiving.tag}, but the tensor to receive it in rank "
                    f"{names[self._membership.rank]} has {vector.numel()}; receive it into a tensor like the "
                    "one that is sent"
                )
            # It is the first from that rank with that tag, so no other message can take its place.
            requests = MpiRequests(self._membership, self._mpi.messages)
            yield from requests.finish([requests.recv(_array(vector), receiving.sender, receiving.tag)])
        finally:
            self._receiving.remove(receiving)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int) -> Steps:
        """Send a vector, and receive one of the length of `incoming`, at the same time.

        Nothing is probed: the receive is there when the other's message comes, so that its answer goes out
        before `outgoing` fills the stream (see `MpiRequests.begin`).
        """
        self._check_tag(tag)
        requests = MpiRequests(self._membership, self._mpi.messages)
        both = [requests.send(_array(outgoing), to, tag), requests.recv(_array(incoming), source, tag)]
        yield from requests.finish(both)

    def find(self, receiving: Receiving) -> int | None:
        """Return the bytes of the message that `receiving` asks for, if it is here, and note its sender."""
        if not receiving.is_first(self._receiving):
            return None
        source = self._mpi.any_source if receiving.source == ANY else receiving.source
        status = self._mpi.status()
        if not self._mpi.messages.Iprobe(source, receiving.tag, status):
            return None
        receiving.sender = status.Get_source()
        return int(status.Get_count(self._mpi.byte))

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._mpi.largest_tag:
            raise UserError(
                f"the tag of a message between hosts is {tag}; give one of 0 to {self._mpi.largest_tag}"
            )


def _array(vector: Tensor) -> numpy.ndarray[Any, Any]:
    array: numpy.ndarray[Any, Any] = as_bytes(vector.detach()).numpy()
    return array
