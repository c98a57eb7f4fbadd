"""Asynchronous decentralized SGD: each worker averages with one other at a time, and waits for nobody."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.replica import Replica
from tutti.strategies.adpsgd_worker import MessageWorker, Pairs, RowWorker
from tutti.strategies.base import Clip, Home, Pace, Strategy, Worker
from tutti.strategies.ranges import at_least, one_of

GRAPHS: Final = ("all", "ring")


@dataclass(frozen=True)
class ADPSGD(Strategy):
    """Asynchronous decentralized parallel SGD (AD-PSGD): averages of random pairs, at nobody's pace.

        g_i = grad l(x_i)
        x_i, x_j = (x_i + x_j) / 2            with a random neighbour j, as one operation
        x_i = optimizer(x_i, g_i)             g_i is from before the average, and x_i may have changed since

    On one host each worker's weights have a row in shared memory and a lock. Both locks are taken in the
    order of ranks, so no two workers ever wait for each other.

    Across hosts the even ranks are active and the odd ones passive. An active worker sends its weights,
    computes on, and adds what comes back when it has come; it has one exchange under way at a time. A passive
    one answers between two batches, and moves the other way by the same amount, so that no weight is lost or
    made. Active workers ask, passive ones answer: no circle of waiting can arise.

        active 0    │ step │ x0 ──┐ step │ x0 += d │ step │
        passive 1   │ step         └ x1 -= d, d ───┘  step │          d = (x1 - x0) / 2

    `graph`: "all" (any other worker) or "ring" (the two beside it). A batch is one worker's own, and so is
    the optimizer's state. What is evaluated and kept is the average of all workers. The paper averages in
    every step (`every` 1), while the gradient is computed; here that is between two computations on one host,
    and beside them between hosts.

    Source: Lian, Zhang, Zhang, Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    arXiv:1710.06952, algorithm 1; active and passive workers: section 3.
    """

    name: ClassVar[str] = "adpsgd"
    home: ClassVar[Home] = Home.PRIVATE
    pace: ClassVar[Pace] = Pace.FREE

    graph: str = field(default="all", metadata={"help": f"who averages with whom: {', '.join(GRAPHS)}"})
    every: int = field(default=1, metadata={"help": "batches of a worker between two averages, from 1"})
    seed: int = field(default=0, metadata={"help": "decides the random neighbours, from 0"})

    def __post_init__(self) -> None:
        one_of(self, "graph", GRAPHS)
        at_least(self, "every", 1)
        at_least(self, "seed", 0)

    @property
    @override
    def period(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        beside = [(comm.rank + hop) % comm.size for hop in (1, -1)]
        near = beside if self.graph == "ring" else range(comm.size)
        pairs = Pairs(sorted({rank for rank in near if rank != comm.rank}), self.every, self.seed)
        kind = RowWorker if comm.hosts == 1 else MessageWorker
        return kind(pairs, replica, comm, optimizer, clip)
