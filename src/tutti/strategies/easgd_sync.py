"""Elastic averaging SGD whose workers exchange at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.parameter_server.rules import attract
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.strategies.averaged import PeerStrategy, PeerWorker
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import number, whole


@part("easgd_sync")
@dataclass(frozen=True)
class EASGDSync(PeerStrategy):
    """Synchronous elastic averaging: every `every` batches all workers and the centre attract each other.

        if every divides t:   c' = (1 - force) c + force * mean of x_i
                              x_i = x_i - force / workers * (x_i - c)            with the c from before
        x_i = optimizer(x_i, g_i)                                                g_i from before the pull

    Every worker has a copy of the centre and moves it the same way, so no server is needed. Each worker has
    its own batches; the centre is evaluated and kept. After the last step there is one more exchange (the
    paper's loop has no end), so that no step is lost.

        worker 0   │ step │ step │ all_reduce x │ step │ step │ ...
        worker 1   │ step │ step │ all_reduce x │ step │ step │ ...

    Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651,
    section 3, equations 2 to 4; there `every` is tau, `force` is beta.
    """

    every: int = whole(10, "batches of a worker between two exchanges")
    force: float = number(0.9, "how far the centre goes to the workers' mean", above=0, most=1)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _EasgdSyncWorker(self, replica, comm, optimizer, clip)


class _EasgdSyncWorker(PeerWorker[EASGDSync]):
    def __init__(
        self, strategy: EASGDSync, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self._centre = [weights.clone() for weights in self.weights]

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.skip()
        self.move()

    @override
    @torch.no_grad()
    def skip(self) -> None:
        """Take part in the exchange of a round."""
        if self.rounds % self.strategy.every == 0:
            self.meet(self.exchange)
        self.rounds += 1

    @override
    def exchange(self, vectors: list[Tensor]) -> int:
        rate = self.strategy.force / self.comm.size
        for weights, centre in zip(vectors, self._centre, strict=True):
            total = weights.clone()
            # A single worker may be on a GPU, where the communicator cannot reach.
            if self.comm.size > 1:
                self.comm.all_reduce(total)
            attract(weights, centre.clone(), rate)
            gather(centre, total, self.comm.size, self.strategy.force)
        return sum(weights.nbytes for weights in vectors)

    @override
    def agree(self) -> None:
        copy_all(self.weights, self._centre)

    @override
    @torch.no_grad()
    def finish(self) -> None:
        """Exchange once more, for the steps since the last time, and take the centre's weights."""
        if self.rounds:
            self.meet(self.exchange)
        super().finish()


def gather(centre: Tensor, total: Tensor, workers: int, force: float) -> None:
    """Move the centre towards the mean of all workers, in place; `total` is overwritten.

        c = (1 - beta) c + beta * (1/p) * sum of x_i

    Source: equation 4 of the paper of `EASGDSync`; `force` is its beta = p * alpha.
    """
    centre.lerp_(total.div_(workers), force)
