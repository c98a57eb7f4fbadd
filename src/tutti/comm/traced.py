"""A communicator that records its operations in a trace; strategies do not know that there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, cast

import torch
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.records.trace import ClockReading, Trace

Method = Callable[..., Any]


def _passed_on(name: str) -> Method:
    """Return a method that calls the inner communicator without recording."""
    return lambda self, *args, **named: getattr(self._comm, name)(*args, **named)


def _recorded(name: str) -> Method:
    """Return a method that calls the inner communicator and records a span."""

    def operation(self: TracedCommunicator, *args: object, **named: object) -> Any:
        began = self._comm.clock()
        result = getattr(self._comm, name)(*args, **named)
        self._trace.add(name, began, self._comm.clock())
        return result

    return operation


class TracedCommunicator(Communicator):
    """A communicator that records its operations, and those of its parts, in a trace."""

    barrier, all_reduce, reduce_scatter, all_gather, all_gather_objects, broadcast, broadcast_object = map(
        _recorded,
        (
            *("barrier", "all_reduce", "reduce_scatter", "all_gather", "all_gather_objects"),
            *("broadcast", "broadcast_object"),
        ),
    )
    send, recv, exchange = map(_recorded, ("send", "recv", "exchange"))
    waiting, shared, counter, clock, compute, note_progress, close = map(
        _passed_on, ("waiting", "shared", "counter", "clock", "compute", "note_progress", "close")
    )

    def __init__(self, comm: Communicator, trace: Trace) -> None:
        self._comm, self._trace = comm, trace
        self.rank, self.size, self.hosts = comm.rank, comm.size, comm.hosts
        self.adding_s_per_byte = comm.adding_s_per_byte
        if comm.servers is not None:
            self.servers = replace(comm.servers, comm=TracedCommunicator(comm.servers.comm, trace))

    @override
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        return [_TracedLock(lock, self._comm, self._trace) for lock in self._comm.locks(count)]

    @cached_property
    @override
    def node(self) -> Communicator:
        node = self._comm.node
        return self if node is self._comm else TracedCommunicator(node, self._trace)

    @cached_property
    @override
    def cross(self) -> Communicator | None:
        cross = self._comm.cross
        return None if cross is None else TracedCommunicator(cross, self._trace)

    @override
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self._comm.split(color, key)
        return None if part is None else TracedCommunicator(part, self._trace)


class _TracedLock(AbstractContextManager[None]):
    def __init__(self, lock: AbstractContextManager[None], comm: Communicator, trace: Trace) -> None:
        self._lock, self._comm, self._trace, self._entered = lock, comm, trace, 0.0

    def __enter__(self) -> None:
        came = self._comm.clock()
        self._lock.__enter__()
        self._entered = self._comm.clock()
        self._trace.add("wait for lock", came, self._entered)

    def __exit__(self, *error: object) -> None:
        left = self._comm.clock()
        self._lock.__exit__(*error)  # type: ignore[arg-type]
        self._trace.add("locked", self._entered, left)


ROUNDS: Final = 32
TAG: Final = 7400


def compare_clocks(comm: Communicator, clock: Callable[[], float]) -> ClockReading | None:
    """Measure the clock of this host against rank 0's (collective); None on one host."""
    if comm.hosts == 1:
        return None
    node, cross = comm.node, comm.cross
    reading = None
    if node.rank == 0:
        assert cross is not None, "every host has a first rank"
        reading = _answer(cross, clock) if cross.rank == 0 else _ask(cross, clock)
    return cast("ClockReading", node.broadcast_object(reading))


def _answer(leaders: Communicator, clock: Callable[[], float]) -> ClockReading:
    value = torch.zeros(1, dtype=torch.float64)
    for other in range(1, leaders.size):
        for _ in range(ROUNDS):
            leaders.recv(value, other, TAG)
            value[0] = clock()
            leaders.send(value, other, TAG)
    return ClockReading(clock(), 0.0, 0.0)


def _ask(leaders: Communicator, clock: Callable[[], float]) -> ClockReading:
    value = torch.zeros(1, dtype=torch.float64)
    readings = []
    for _ in range(ROUNDS):
        asked = clock()
        leaders.send(value, 0, TAG)
        leaders.recv(value, 0, TAG)
        told = clock()
        middle = (asked + told) / 2
        readings.append(ClockReading(middle, middle - float(value), (told - asked) / 2))
    return min(readings, key=lambda reading: reading.residual_s)
