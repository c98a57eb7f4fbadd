"""Messages between two ranks of a group whose ranks are on several hosts, over MPI."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy
from torch import Tensor

from tutti.comm.base import ANY
from tutti.comm.mpi.group import MpiGroup
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.point_to_point import Receiving
from tutti.comm.shm.rings import as_bytes
from tutti.torch_backend.errors import Mismatch, Unusable
from tutti.torch_backend.shutdown import Departures


class DistantMessages:
    """What one rank of a group sends and receives.

    Args:
        mpi: the group's MPI communicators.
        departures: who has left.
        rank: this process's number in the group.
        names: what the group's ranks are called in errors: their numbers in the job.
    """

    def __init__(self, mpi: MpiGroup, departures: Departures, rank: int, names: Sequence[int]) -> None:
        self._mpi, self._departures, self._rank, self._names = mpi, departures, rank, tuple(names)
        self._receiving: list[Receiving] = []

    def _finish(self, request: Any) -> Steps:
        done = False
        try:
            while not (done := request.Test()):
                yield False
        except self._mpi.error as error:
            done = True
            raise self._departures.explained(error) from error
        finally:
            if not done:
                # It may still be written to.
                self._departures.abandon([request])

    def send(self, vector: Tensor, to: int, tag: int) -> Steps:
        """Send `vector`; it may be overwritten at the end. Messages to one rank keep their order."""
        self._check_tag(tag)
        yield from self._finish(self._mpi.messages.Isend(as_bytes(vector).numpy(), to, tag))

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
                yield from self._finish(message.Irecv(numpy.empty(nbytes, numpy.uint8)))
                raise Mismatch(
                    f"rank {self._names[receiving.sender]} sent {nbytes} bytes with tag {receiving.tag}, but "
                    f"the tensor to receive it in rank {self._names[self._rank]} has {vector.nbytes}; "
                    "receive it into a tensor like the one that is sent"
                )
            yield from self._finish(message.Irecv(as_bytes(vector).numpy()))
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
            raise self._departures.explained(error) from error
        return None if message is None else (status, message)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._mpi.largest_tag:
            raise Unusable(
                f"the tag of a message between hosts is {tag}; give one of 0 to {self._mpi.largest_tag}"
            )
