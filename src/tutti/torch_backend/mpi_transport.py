"""Vectors and messages between the ranks of a group on several hosts, over MPI, and the ranks that have left.

Operations are generators that never block: requests are begun, and tested whenever the generator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import numpy
from torch import Tensor

from tutti.comm.base import ANY
from tutti.comm.mpi.group import MpiGroup, wait_for_names
from tutti.comm.mpi.leave_notices import LeaveNotices, free_later, free_what_is_over
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.point_to_point import Receiving
from tutti.comm.shm.rings import as_bytes
from tutti.torch_backend.errors import Mismatch, RankLost, Unusable

_VECTORS: Final = 1
"""The tag, on the communicator for collectives, of vectors; `HEADERS` and `LEAVE_TAG` are the others."""

HEADERS: Final = 0
"""The tag of the messages at the beginning of a collective."""

Request = tuple[int, Any]
"""A rank of the group, and MPI's request for a message to it or from it."""


class RemotePeers:
    """The group's ranks on other hosts: which have left, which are lost.

    Args:
        mpi: the group's MPI communicators.
        names: the ranks' numbers in the job.
        elsewhere: the ranks on other hosts.
        all_here_left: tells whether all ranks of this host have left.
        report: tells the ranks of this host that a rank, numbered in the job, is lost.
    """

    def __init__(
        self,
        mpi: MpiGroup,
        names: Sequence[int],
        elsewhere: Sequence[int],
        all_here_left: Callable[[], bool],
        report: Callable[[int], None],
    ) -> None:
        self._mpi, self._names = mpi, tuple(names)
        self._all_here_left, self._report = all_here_left, report
        self._notices = LeaveNotices(mpi.module, mpi.collectives, elsewhere)
        self._abandoned: list[Any] = []
        free_what_is_over(mpi.error)

    def early(self, begun: int) -> list[int]:
        """The ranks of other hosts that have left, and will not come to the latest of `begun` collectives."""
        self._look()
        return self._notices.early(begun)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank of another host has left, and no message from it can still come."""
        self._look()
        return self._notices.has_left(rank)

    def _look(self) -> None:
        try:
            lost = self._notices.look(self._failed)
        except self._mpi.error as error:
            raise self.explained(error) from error
        for name in lost[:1]:
            self._report(name)

    def _failed(self) -> list[int]:
        return [self._names[rank] for rank in self._mpi.failed()]

    def explained(self, error: Exception) -> RankLost:
        """The lost rank that an error of MPI's stands for."""
        lost = wait_for_names(self._failed) if self._mpi.ulfm else []
        for name in lost[:1]:
            self._report(name)
        return RankLost(lost, f"MPI says: {error}")

    def abandon(self, requests: Sequence[Any]) -> None:
        """Keep requests under way, and their memory, although nobody waits for them any more."""
        self._abandoned += requests

    def leave(self, done: int, lost: Sequence[int]) -> None:
        """Tell the ranks of other hosts that this one leaves.

        Args:
            done: the number of collectives that it has finished.
            lost: the rank because of which it leaves, numbered in the job, if it has lost one.
        """
        try:
            self._notices.send(done, lost)
        except self._mpi.error:
            # A rank is dead, and MPI tells the others.
            return
        free_later(self._over, self._mpi.free)
        free_what_is_over(self._mpi.error)

    def _over(self) -> bool:
        """Return whether all ranks have left, and nothing is under way."""
        return (
            self._notices.all_over()
            and self._all_here_left()
            and all(request.Test() for request in self._abandoned)
        )


class MpiRequests:
    """The vectors between one rank and those of other hosts.

    Args:
        mpi: the group's MPI communicators.
        remote_peers: the ranks of other hosts.
    """

    def __init__(self, mpi: MpiGroup, remote_peers: RemotePeers) -> None:
        self.mpi, self.remote_peers = mpi, remote_peers
        self._pending: list[Request] = []

    @property
    def awaited(self) -> list[int]:
        """The ranks to or from which vectors are under way, for which this rank waits."""
        return sorted({rank for rank, _ in self._pending})

    def send(self, array: numpy.ndarray[Any, Any], to: int, tag: int = _VECTORS) -> Request:
        """Begin to send an array, which stays as it is until that is finished."""
        return to, self.mpi.collectives.Isend(array, to, tag)

    def recv(self, array: numpy.ndarray[Any, Any], source: int, tag: int = _VECTORS) -> Request:
        """Begin to receive an array; a shorter one may come."""
        return source, self.mpi.collectives.Irecv(array, source, tag)

    def finish(self, requests: Sequence[Request]) -> Steps:
        """Wait for requests.

        Raises:
            RankLost: MPI says that one cannot be fulfilled.
        """
        self._pending = list(requests)
        try:
            while self._pending:
                self._pending = [(rank, request) for rank, request in self._pending if not request.Test()]
                if self._pending:
                    yield False
        except self.mpi.error as error:
            raise self.remote_peers.explained(error) from error
        finally:
            # MPI may still write into the memory of requests that are given up.
            self.remote_peers.abandon([request for _, request in self._pending])
            self._pending = []

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Steps:
        """Send vectors to some ranks, and receive them from some; empty ones do not travel."""
        yield from self.finish(self.begin(outgoing, incoming))

    def begin(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[Request]:
        """Begin an `exchange`."""
        coming = [
            self.recv(as_bytes(vector).numpy(), rank) for rank, vector in incoming.items() if len(vector)
        ]
        going = [
            self.send(as_bytes(vector).numpy(), rank) for rank, vector in outgoing.items() if len(vector)
        ]
        return coming + going


class MpiMessages:
    """The messages that one rank of a group sends and receives.

    Args:
        mpi: the group's MPI communicators.
        remote_peers: the ranks of other hosts.
        rank: this process's number in the group.
        names: the numbers of the group's ranks in the job, for errors.
    """

    def __init__(self, mpi: MpiGroup, remote_peers: RemotePeers, rank: int, names: Sequence[int]) -> None:
        self._mpi, self._remote_peers, self._rank, self._names = mpi, remote_peers, rank, tuple(names)
        self._receiving: list[Receiving] = []

    def _finish(self, rank: int, request: Any) -> Steps:
        # Messages run beside each other: each has pending requests of its own.
        return MpiRequests(self._mpi, self._remote_peers).finish([(rank, request)])

    def send(self, vector: Tensor, to: int, tag: int) -> Steps:
        """Send `vector`; it may be overwritten at the end. Messages to one rank keep their order."""
        self._check_tag(tag)
        yield from self._finish(to, self._mpi.messages.Isend(as_bytes(vector).numpy(), to, tag))

    def recv(self, vector: Tensor, receiving: Receiving) -> Generator[bool, None, None]:
        """Overwrite `vector` with the next message that `receiving` asks for.

        Raises:
            Mismatch: the message has another length than `vector`. It is lost.
        """
        self._check_tag(receiving.tag)
        self._receiving.append(receiving)
        try:
            while (found := self._probe(receiving)) is None:
                yield False
            status, message = found
            receiving.sender, nbytes = status.Get_source(), status.Get_count(self._mpi.byte)
            if nbytes != vector.nbytes:
                yield from self._finish(receiving.sender, message.Irecv(numpy.empty(nbytes, numpy.uint8)))
                raise Mismatch(
                    f"rank {self._names[receiving.sender]} sent {nbytes} bytes with tag {receiving.tag}, but "
                    f"the tensor to receive it in rank {self._names[self._rank]} has {vector.nbytes}; "
                    "receive it into a tensor like the one that is sent"
                )
            yield from self._finish(receiving.sender, message.Irecv(as_bytes(vector).numpy()))
        finally:
            self._receiving.remove(receiving)

    def _probe(self, receiving: Receiving) -> tuple[Any, Any] | None:
        for earlier in self._receiving:
            if earlier is receiving:
                break
            if earlier.competes(receiving):
                return None
        source = self._mpi.any_source if receiving.source == ANY else receiving.source
        status = self._mpi.status()
        try:
            message = self._mpi.messages.Improbe(source, receiving.tag, status)
        except self._mpi.error as error:
            raise self._remote_peers.explained(error) from error
        return None if message is None else (status, message)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._mpi.largest_tag:
            raise Unusable(
                f"the tag of a message between hosts is {tag}; give one of 0 to {self._mpi.largest_tag}"
            )
