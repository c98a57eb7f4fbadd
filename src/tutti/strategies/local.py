"""Local SGD: workers step on their own, and average their weights every so often."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.registry import part
from tutti.replica import Replica
from tutti.strategies.averaged import AveragedWorker, PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import whole


@part("local")
@dataclass(frozen=True)
class Local(PeerStrategy):
    """Local SGD: the workers' weights are averaged after every `every` batches of each.

        x_i = optimizer(x_i, g_i(x_i))                         each worker i with its own batch
        x_i = 1/n sum over j of x_j       in step t = 1, 2, ...   if t <= after, or every divides t - after

    Post-local SGD is the same with the first `after` steps averaged one by one: plain SGD's then make just
    the step of the mean gradient of all batches, as synchronous training does. Momentum and other state of
    the optimizer is each worker's own and is never averaged; with SGD's momentum, which is linear, the steps
    up to `after` are the synchronous ones too. BatchNorm's statistics are each worker's own in training, and
    averaged for evaluations and in the end.

        worker 0   │ step │ step │ average │ step │ step │ average │        every = 2
        worker 1   │ step │ step │ average │ step │ step │ average │

    On one host the average is read from all workers' rows in shared memory.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, algorithm 1;
    Lin, Stich, Patel, Jaggi 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217 (post-local
    SGD).
    """

    every: int = whole(8, "batches of a worker between two averagings")
    after: int = whole(0, "how many first batches are averaged one by one (post-local)", least=0)

    @property
    @override
    def period(self) -> int:
        return 1 if self.after else self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _LocalWorker(self, replica, comm, optimizer, clip)


class _LocalWorker(AveragedWorker):
    def __init__(
        self, strategy: Local, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(replica, comm, optimizer, clip)
        self._strategy = strategy

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.move()
        self.skip()

    @override
    def skip(self) -> None:
        """Take part in the averaging that may follow a round."""
        self.rounds += 1
        late = self.rounds - self._strategy.after
        if late <= 0 or late % self._strategy.every == 0:
            self.meet(self.average.take)
