"""A synchronous parameter server, with backup workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from tutti.centre import Rounds, Rule, join_centre
from tutti.comm.base import Communicator
from tutti.replica import Replica
from tutti.strategies.base import Clip, Pace, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.ranges import within


@dataclass(frozen=True)
class ParamServer(Centred):
    """Synchronous training around a parameter server that waits for a quorum of the workers.

        G = workers / n * sum of the first n gradients g_i(c) of a step,    n = quorum * workers, rounded up
        c = optimizer(c, clip(G)),  w_i = c for all whose gradient was used

    With `quorum` 1 every step waits for all, and the training is that of one worker on the whole batch (as
    with `sync`). Below that the slowest ones are the backup workers: a gradient that comes when its step has
    closed is dropped (and counted), and its worker goes on from the newest weights.

        quorum 0.6   worker 0  │ g(c0) ─┐          │ g(c1) ─┐
                     worker 1  │ g(c0) ────┐       │ g(c1) ───┐
                     centre    c0         c1                  c2
                     worker 2  │     g(c0) ──────── dropped │ g(c1) ...

    A batch is split over the workers. Workers that have none left are not waited for.

    Source: Chen, Pan, Monga, Bengio, Jozefowicz 2016, "Revisiting Distributed Synchronous SGD",
    arXiv:1604.00981, algorithms 3 and 4 (there n is N, and the workers beyond it are the b backup workers).
    """

    name: ClassVar[str] = "paramserver"
    pace: ClassVar[Pace] = Pace.TOGETHER

    quorum: float = field(
        default=1.0, metadata={"help": "share of the workers whose gradients close a step, above 0 to 1"}
    )

    def __post_init__(self) -> None:
        within(self, "quorum", 0.0, 1.0, above=True)

    @override
    def most_levels(self) -> int:
        # A round closes everywhere at once.
        return 1

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        return Rounds(optimizer, replica, workers, self.quorum, clip.norm, clip.value)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        rule = self.rule(replica, optimizer, comm.size, clip)
        # The clipping is that of the whole gradient, and the centre's business.
        return _ParamServerWorker(replica, join_centre(comm, replica, rule), optimizer, Clip())


class _ParamServerWorker(CentredWorker):
    @override
    def step(self) -> None:
        self.prepare()
        self.count(self.centre.exchange(self.grads, self.weights))
