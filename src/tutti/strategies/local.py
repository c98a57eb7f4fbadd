"""Local SGD: workers step on their own, and average their weights every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.registry import part
from tutti.replica import Replica
from tutti.strategies.averaged import AveragedWorker, PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import whole

FIRST_MOMENT: Final = frozenset({"exp_avg", "momentum_buffer"})
"""Names of the running mean of gradients in the state of an optimizer."""

SECOND_MOMENT: Final = frozenset({"exp_avg_sq"})
"""Names of the running mean of their squares."""


@part("local")
@dataclass(frozen=True)
class Local(PeerStrategy):
    """Local SGD: the workers' weights are averaged after every `every` batches of each.

        x_i = optimizer(x_i, g_i(x_i))                         each worker i with its own batch
        x_i = 1/n sum over j of x_j       in step t = 1, 2, ...   if t <= after, or every divides t - after

    Post-local SGD is the same with the first `after` steps averaged one by one: plain SGD's then make just
    the step of the mean gradient of all batches, as synchronous training does. Momentum and other state of
    the optimizer is each worker's own and by default never averaged; with SGD's momentum, which is linear,
    the steps up to `after` are the synchronous ones too. BatchNorm's statistics are each worker's own in
    training, and averaged for evaluations and in the end.

    DES-LOC averages the optimizer's moments as well, with periods of their own, as they change more slowly
    than the weights: its authors use 3 `every` for the first and 6 `every` for the second. With all three
    equal it is Local Adam.

        u_i = 1/n sum over j of u_j       after each `first_moment_every` batches
        v_i = 1/n sum over j of v_j       after each `second_moment_every` batches

    u is exp_avg or momentum_buffer of the optimizer's state, v is exp_avg_sq; an optimizer without them makes
    local SGD. Where a worker has never seen a gradient of some weight, as with sparse inputs, its v is 0, and
    a u from others makes a huge step: then give both the same period. As printed, a step uses a gradient from
    before the averaging; here the averages come before the next gradient, as in local SGD.

        worker 0   │ step │ step │ average │ step │ step │ average │        every = 2
        worker 1   │ step │ step │ average │ step │ step │ average │

    On one host the average is read from all workers' rows in shared memory.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, algorithm 1;
    Lin, Stich, Patel, Jaggi 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217 (post-local
    SGD). Iacob et al. 2025, "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
    Models", arXiv:2505.22549, algorithm 1 (periods of moments: K_x, K_u and K_v).
    """

    every: int = whole(8, "batches of a worker between two averagings")
    after: int = whole(0, "how many first batches are averaged one by one (post-local)", least=0)
    first_moment_every: int = whole(0, "batches between two averagings of Adam's mean; 0: never", least=0)
    second_moment_every: int = whole(0, "batches between two averagings of Adam's squares; 0: never", least=0)

    @property
    @override
    def period(self) -> int:
        return 1 if self.after else self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        if self.first_moment_every and not self.second_moment_every and "betas" in optimizer.defaults:
            raise BadOption(
                f"{self.as_given('first_moment_every')} without 'second_moment_every', but a mean from "
                "others makes a huge step where a worker's own squares are 0; give both the same period"
            )
        return _LocalWorker(self, replica, comm, optimizer, clip)


class _LocalWorker(AveragedWorker[Local]):
    @override
    def skip(self) -> None:
        """Take part in the averaging that may follow a round."""
        self.rounds += 1
        one = self.strategy
        if self._is_due(one.every):
            self.meet(self.exchange)
        for every, moment in (
            (one.first_moment_every, FIRST_MOMENT),
            (one.second_moment_every, SECOND_MOMENT),
        ):
            if every and self._is_due(every):
                self._average_moment(moment)

    def _is_due(self, every: int) -> bool:
        late = self.rounds - self.strategy.after
        return late <= 0 or late % every == 0

    @torch.no_grad()
    def _average_moment(self, keys: frozenset[str]) -> None:
        """Average a moment; zeros stand for what this worker's optimizer does not have (yet)."""
        assert self.steps is not None
        vectors = [torch.zeros_like(weights) for weights in self.weights]
        places = {
            name: vector[span]
            for flat, vector in zip(self.replica.flats, vectors, strict=True)
            for name, span in zip(flat.names, flat.spans, strict=True)
        }
        moments = []
        for piece in self.steps.state().pieces:
            name, _, key = piece.name.partition("/")[2].rpartition("/")
            if key in keys:
                moments.append((places[name][piece.start : piece.stop], piece.values))
        for place, values in moments:
            place.copy_(values)
        self.meet(lambda _: self.average.take(vectors))
        for place, values in moments:
            values.copy_(place)
