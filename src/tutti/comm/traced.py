"""A communicator that records its operations in a trace; strategies do not know that there is one."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor
from typing_extensions import override

from tutti.comm.base import ANY, Communicator
from tutti.records.trace import SpanLink, Trace

Method = Callable[..., Any]


def traced(comm: Communicator, trace: Trace, name: str = "all") -> Communicator:
    """Return `comm` with its operations, and those of its parts, recorded in `trace` (collective)."""
    leader = cast("int", comm.node.broadcast_object(comm.rank))
    return TracedCommunicator(comm, trace, name, leader)


def _passed_on(name: str) -> Method:
    """The operation of the communicator inside, not recorded."""
    return lambda self, *args, **named: getattr(self._comm, name)(*args, **named)


def _meeting(name: str) -> Method:
    """The collective, recorded."""
    return lambda self, *args: self._record(SpanLink.MEET, name, *args)


def _from_root(name: str) -> Method:
    """The broadcast, recorded."""
    return lambda self, value, root=0: self._record(
        SpanLink.ROOT if self.rank == root else SpanLink.LEAF, name, value, root
    )


class TracedCommunicator(Communicator):
    """A communicator that records its operations in a trace.

    Args:
        leader: the rank, in `comm`, of the first rank of this host.
    """

    barrier, all_reduce, reduce_scatter, all_gather, all_gather_objects = map(
        _meeting, ("barrier", "all_reduce", "reduce_scatter", "all_gather", "all_gather_objects")
    )
    broadcast, broadcast_object = map(_from_root, ("broadcast", "broadcast_object"))
    waiting, shared, counter, clock, compute, close = map(
        _passed_on, ("waiting", "shared", "counter", "clock", "compute", "close")
    )

    def __init__(self, comm: Communicator, trace: Trace, name: str, leader: int) -> None:
        self._comm, self._trace, self._name, self._leader = comm, trace, name, leader
        self.rank, self.size, self.hosts = comm.rank, comm.size, comm.hosts
        self._collectives = self._splits = self._locks = 0
        self._messages: Counts[Hashable] = Counts()
        if comm.servers is not None:
            reach = TracedCommunicator(comm.servers.comm, trace, "workers and servers", 0)
            self.servers = replace(comm.servers, comm=reach)

    def _record(self, kind: SpanLink, name: str, *arguments: object) -> Any:
        began = self._comm.clock()
        result = getattr(self._comm, name)(*arguments)
        self._collectives += 1
        key = ("meeting", self._name, self._collectives, self.size)
        self._trace.link(name, began, self._comm.clock(), kind, key)
        return result

    def _record_message(
        self, name: str, began: float, kind: SpanLink, source: int, to: int, tag: int
    ) -> None:
        """Messages from one rank to another with one tag keep their order, so that both ends count alike."""
        way = (source, to, tag)
        self._messages[kind, way] += 1
        key = ("message", self._name, way, self._messages[kind, way])
        self._trace.link(name, began, self._comm.clock(), kind, key)

    @override
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        began = self.clock()
        self._comm.send(vector, to, tag)
        self._record_message("send", began, SpanLink.SEND, self.rank, to, tag)

    @override
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        began = self.clock()
        sender = self._comm.recv(vector, source, tag)
        self._record_message("recv", began, SpanLink.RECEIVE, sender, self.rank, tag)
        return sender

    @override
    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        began = self.clock()
        self._comm.exchange(outgoing, to, incoming, source, tag)
        self._record_message("exchange", began, SpanLink.SEND, self.rank, to, tag)
        self._record_message("", began, SpanLink.RECEIVE, source, self.rank, tag)

    @override
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        self._locks += 1
        key = ("lock", self._name, self._leader, self._locks)
        found = enumerate(self._comm.locks(count))
        return [_TracedLock(lock, self, (*key, number)) for number, lock in found]

    @cached_property
    @override
    def node(self) -> Communicator:
        node = self._comm.node
        if node is self._comm:
            return self
        return TracedCommunicator(node, self._trace, f"{self._name}, host of {self._leader}", 0)

    @cached_property
    @override
    def cross(self) -> Communicator | None:
        cross, name = self._comm.cross, f"{self._name}, across {self._comm.node.rank}"
        return None if cross is None else TracedCommunicator(cross, self._trace, name, cross.rank)

    @override
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        self._splits += 1
        part = self._comm.split(color, key)
        return None if part is None else traced(part, self._trace, f"{self._name}, {self._splits}/{color}")


class _TracedLock(AbstractContextManager[None]):
    def __init__(
        self, lock: AbstractContextManager[None], comm: TracedCommunicator, key: tuple[Hashable, ...]
    ) -> None:
        self._lock, self._comm, self._key, self._entered = lock, comm, key, 0.0

    def __enter__(self) -> None:
        comm = self._comm
        came = comm.clock()
        self._lock.__enter__()
        self._entered = comm.clock()
        comm._trace.add("wait for lock", came, self._entered)

    def __exit__(self, *error: object) -> None:
        # Before it is released: the next holder must come later.
        left = self._comm.clock()
        self._lock.__exit__(*error)  # type: ignore[arg-type]
        self._comm._trace.link("locked", self._entered, left, SpanLink.HOLD, self._key)
