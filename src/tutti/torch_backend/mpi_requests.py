"""Vectors between the ranks of a group over MPI, as generators: nothing here blocks.

Requests are begun, and asked after whenever the generator is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy
from torch import Tensor

from tutti.comm.mpi.group import MpiGroup
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.rings import as_bytes
from tutti.torch_backend.shutdown import Departures

_VECTORS: Final = 1
"""The tag, on the communicator for collectives, of vectors; `HEADERS` and `FAREWELL` are the others."""

HEADERS: Final = 0
"""The tag of what is told at the beginning of a collective."""

Request = tuple[int, Any]
"""A rank of the group, and MPI's request for what goes there or comes from there."""


class Wire:
    """One rank's end of the connections to all others.

    Args:
        mpi: the group's MPI communicators.
        departures: who has left.
    """

    def __init__(self, mpi: MpiGroup, departures: Departures) -> None:
        self.mpi, self.departures = mpi, departures
        self._pending: list[Request] = []

    @property
    def awaited(self) -> list[int]:
        """The ranks that something is to go to, or come from, for which this one waits."""
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
            raise self.departures.explained(error) from error
        finally:
            # What is given up may still be written to.
            self.departures.abandon([request for _, request in self._pending])
            self._pending = []

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Steps:
        """Give some ranks a vector each, and take one from some; empty ones do not travel."""
        yield from self.finish(self.begin(outgoing, incoming))

    def begin(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[Request]:
        """Begin a `swap`."""
        coming = [
            self.recv(as_bytes(vector).numpy(), rank) for rank, vector in incoming.items() if len(vector)
        ]
        going = [
            self.send(as_bytes(vector).numpy(), rank) for rank, vector in outgoing.items() if len(vector)
        ]
        return coming + going
