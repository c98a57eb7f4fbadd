"""The communicator of a single rank that records operations and leaves every vector as it is."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import ANY, Communicator, Counter
from tutti.parameter_server.protocol import REQUEST, Request

SERVED: Final = (Request.BEGIN, Request.PUSH, Request.EXCHANGE, Request.PULL)
"""The requests that a server answers at once, or never."""


class Unpredictable(Exception):
    """The communication depends on data, or on the time of other workers; the message says why."""


class CommOperation(NamedTuple):
    """An operation of one rank."""

    kind: str  # a collective, such as "all_reduce", or "exchange", "send" or "recv"
    group: str  # "all", "host" (the ranks of one host), "lane" (one rank of each host) or "servers"
    nbytes: float  # of the vector
    peer: int = 0  # the number of the server, for "send" and "recv"


class Recorder(Communicator):
    """The communicator of rank 0, without other ranks. It receives what it has sent, or nothing.

    Args:
        operations: records are added here.
        sizes: the ranks on each host; no host has fewer than the first.
        group: as in `CommOperation`; "self": this rank alone.
    """

    in_backward = False
    rank = 0

    def __init__(self, operations: list[CommOperation], sizes: Sequence[int], group: str = "all") -> None:
        self._operations, self._sizes, self._group = operations, tuple(sizes), group
        self.size, self.hosts = sum(sizes), len(sizes)
        self._requested = deque[int]()  # the servers that have not answered yet

    def _note(self, kind: str, nbytes: float = 0.0, peer: int = 0) -> None:
        # Another host may have several ranks.
        if self.size > 1 or self._group == "host":
            self._operations.append(CommOperation(kind, self._group, nbytes, peer))

    @override
    def barrier(self) -> None:
        self._note("barrier")

    @override
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        self._note("broadcast", vector.nbytes)

    @override
    def all_reduce(self, vector: Tensor) -> None:
        self._note("all_reduce", vector.nbytes)

    @override
    def reduce_scatter(self, vector: Tensor) -> None:
        self._note("reduce_scatter", vector.nbytes)

    @override
    def all_gather(self, vector: Tensor) -> None:
        self._note("all_gather", vector.nbytes)

    @override
    def broadcast_object(self, value: object, root: int = 0) -> object:
        self._note("broadcast", len(pickle.dumps(value)))
        return value

    @override
    def all_gather_objects(self, value: object) -> list[object]:
        self._note("all_gather", self.size * len(pickle.dumps(value)))
        return [value] * self.size

    @override
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        if self._group != "servers":
            self._refuse("workers send messages to each other")
        if tag == REQUEST:
            if int(vector[0]) not in SERVED:
                self._refuse("the answer of a server depends on other workers")
            if int(vector[0]) != Request.PUSH:
                self._requested.append(to)
        self._note("send", vector.nbytes, to)

    @override
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        if self._group != "servers":
            self._refuse("workers wait for messages of each other")
        if source == ANY:
            source = self._requested.popleft()
        self._note("recv", vector.nbytes, source)
        return source

    @override
    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        self._note("exchange", outgoing.nbytes)
        incoming.copy_(outgoing)

    @override
    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        self._refuse("a worker looks whether a message has come")

    @override
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    @override
    def counter(self) -> Counter:
        self._refuse("workers share a counter in memory")

    @override
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        self._refuse("workers share locks in memory")

    @property
    @override
    def node(self) -> Communicator:
        if self._group != "all":
            return self if self.hosts == 1 else Recorder(self._operations, (1,), "self")
        return Recorder(self._operations, self._sizes[:1], "host")

    @property
    @override
    def cross(self) -> Communicator:
        return Recorder(self._operations, (1,) * self.hosts, "lane")

    @override
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        self._refuse("workers form groups")

    @override
    def clock(self) -> float:
        return 0.0

    @override
    def compute(self, seconds: float) -> None:
        return

    @override
    def close(self) -> None:
        return

    def _refuse(self, why: str) -> NoReturn:
        raise Unpredictable(why)
