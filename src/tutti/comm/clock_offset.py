"""The offsets between the clocks of hosts, measured by messages there and back.

    rank 0                 v ──┐                         the answer was made between a and b; taking it to be
    leader of a host   a ──┘   └── b                     in the middle is wrong by at most (b - a) / 2

Source: Cristian 1989, "Probabilistic clock synchronization", Distributed Computing 3: of many such
exchanges the fastest is the best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch

from tutti.comm.base import Communicator
from tutti.records.trace import ClockReading

ROUNDS: Final = 32
TAG: Final = 7400


def compare_clocks(comm: Communicator, clock: Callable[[], float]) -> ClockReading | None:
    """Measure the clock of this host against rank 0's (collective); None on one host."""
    if comm.hosts == 1:
        return None
    node, cross = comm.node, comm.cross
    found = None
    if node.rank == 0:
        assert cross is not None, "every host has a first rank"
        found = _answer(cross, clock) if cross.rank == 0 else _ask(cross, clock)
    return cast("ClockReading", node.broadcast_object(found))


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
    found = []
    for _ in range(ROUNDS):
        asked = clock()
        leaders.send(value, 0, TAG)
        leaders.recv(value, 0, TAG)
        told = clock()
        middle = (asked + told) / 2
        found.append(ClockReading(middle, middle - float(value), (told - asked) / 2))
    return min(found, key=lambda reading: reading.residual_s)
