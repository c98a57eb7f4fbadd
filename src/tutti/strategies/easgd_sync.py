"""Elastic averaging SGD whose workers exchange at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.clipping import clip as clip_gradient
from tutti.parameter_server.rules import attract
from tutti.replica import Replica
from tutti.strategies.base import Clip, Home, Pace, Strategy, Worker, part
from tutti.strategies.local_steps import LocalSteps
from tutti.strategies.options import number, whole


@part("easgd_sync")
@dataclass(frozen=True)
class EASGDSync(Strategy):
    """Synchronous elastic averaging: every `every` batches all workers and the centre pull at each other.

        if every divides t:   c' = (1 - force) c + force * mean of x_i
                              x_i = x_i - force / workers * (x_i - c)            with the c from before
        x_i = optimizer(x_i, g_i)                                                g_i from before the pull

    Every worker has the centre and moves it alike, so no server is needed. With `momentum` the optimizer is
    SGD with Nesterov's momentum. A batch is one worker's own; what is evaluated and kept is the centre. After
    the last step there is one more exchange (the paper's loop has no end), so that no step is lost.

        worker 0   │ step │ step │ all_reduce x │ step │ step │ ...
        worker 1   │ step │ step │ all_reduce x │ step │ step │ ...

    Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651,
    section 3, equations 2 to 4; there `every` is tau, `force` is beta.
    """

    home: ClassVar[Home] = Home.PRIVATE
    pace: ClassVar[Pace] = Pace.ABREAST
    rarer: ClassVar[str] = "--strategy.every {every}"

    every: int = whole(10, "batches of a worker between two exchanges")
    force: float = number(0.9, "how far the centre goes to the workers' mean", above=0, most=1)
    momentum: float = number(0.0, "Nesterov momentum of each worker (needs plain sgd)", least=0, below=1)

    @property
    @override
    def period(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _EasgdSyncWorker(self, replica, comm, optimizer, clip)


class _EasgdSyncWorker(Worker):
    def __init__(
        self, strategy: EASGDSync, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__()
        self._strategy, self._comm, self._clip, self._replica = strategy, comm, clip, replica
        self._weights = [flat.weights for flat in replica.flats]
        self._grads = [flat.grads for flat in replica.flats]
        self._centre = [weights.clone() for weights in self._weights]
        self._local = LocalSteps(replica, optimizer, strategy.momentum, strategy.name)
        self._rounds, self._exchanged_at = 0, comm.clock()
        self._aside: list[torch.Tensor] | None = None

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.skip()
        with self.updating:
            clip_gradient(self._grads, self._clip.norm, self._clip.value)
            self._local.step()

    @override
    @torch.no_grad()
    def skip(self) -> None:
        """Take part in the exchange of a round."""
        if self._rounds % self._strategy.every == 0:
            with self._local.at_rest():
                self._exchange()
        self._rounds += 1

    def _exchange(self) -> None:
        began, sent = self._comm.clock(), 0
        rate = self._strategy.force / self._comm.size
        for weights, centre in zip(self._weights, self._centre, strict=True):
            total = weights.clone()
            # One worker is its own sum, also where the communicator cannot reach: on a GPU.
            if self._comm.size > 1:
                self._comm.all_reduce(total)
            sent += total.nbytes
            attract(weights, centre.clone(), rate)
            gather(centre, total, self._comm.size, self._strategy.force)
        now = self._comm.clock()
        self.traffic.add(sent, now - began, 0, now - self._exchanged_at)
        self._exchanged_at = now

    @override
    def settle(self) -> None:
        self._aside = [weights.clone() for weights in self._weights]
        self._take_centre()

    @override
    def resume(self) -> None:
        if self._aside is not None:
            for weights, kept in zip(self._weights, self._aside, strict=True):
                weights.copy_(kept)
            self._aside = None

    @override
    @torch.no_grad()
    def adopt(self) -> None:
        for centre, weights in zip(self._centre, self._weights, strict=True):
            centre.copy_(weights)
        self._local.rest()
        if self._aside is not None:
            self._aside = [weights.clone() for weights in self._weights]

    @override
    @torch.no_grad()
    def finish(self) -> None:
        """Exchange once more, for the steps since the last time, and take the centre's weights."""
        if self._rounds:
            with self._local.at_rest():
                self._exchange()
        self._take_centre()
        self._aside = None

    def _take_centre(self) -> None:
        for weights, centre in zip(self._weights, self._centre, strict=True):
            weights.copy_(centre)


def gather(centre: Tensor, total: Tensor, workers: int, force: float) -> None:
    """Move the centre towards the mean of all workers, in place.

        c = (1 - beta) c + beta * (1/p) * sum of x_i

    Source: equation 4 of the paper that `EASGDSync` names; `force` is its beta = p * alpha.

    Args:
        centre: c.
        total: the sum of the workers' weights, before they are moved themselves. It is overwritten.
        workers: p.
        force: beta.
    """
    centre.lerp_(total.div_(workers), force)
