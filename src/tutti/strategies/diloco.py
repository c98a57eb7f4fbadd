"""DiLoCo: many steps of each worker's own, then one step of an outer optimizer for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.sharded import equal_slices
from tutti.registry import part
from tutti.replica import Replica
from tutti.state import Saved, State, fill_all, pieces_of
from tutti.strategies.averaged import AveragedWorker, PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import number, whole

ANCHOR: Final = "anchor"
"""The first word of the names of the weights at which a round began, in a checkpoint."""

VELOCITY: Final = "velocity"
"""The first word of the names of the outer momentum."""


@part("diloco")
@dataclass(frozen=True)
class DiLoCo(PeerStrategy):
    """Distributed low-communication training: local steps, and Nesterov's momentum between their averages.

        for t = 1, 2, ...:
            x_i = x                                          every worker begins at the common weights
            `every` times:  x_i = optimizer(x_i, g_i)        with its own batches; the paper's is AdamW
            d = 1/n sum over i of (x - x_i)                  the outer gradient
            v = outer_momentum v + d
            x = x - outer_lr (d + outer_momentum v)

    The state of the inner optimizer is each worker's own and goes on from one round to the next; the outer
    momentum is the same on all workers, so no rank is spent on keeping it. With outer_lr 1 and without outer
    momentum this is local SGD. BatchNorm's statistics are averaged for evaluations and in the end.

        worker 0   │ step │ step │ ... │ average, outer step │ step │ step │ ...
        worker 1   │ step │ step │ ... │ average, outer step │ step │ step │ ...

    What is evaluated in the middle of a round is what the run would give if it ended there: an outer step
    from the average so far.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, algorithm 1; there `every` is H, 500 for its long runs.
    """

    every: int = whole(20, "batches of a worker between two outer steps")
    outer_lr: float = number(0.7, "learning rate of the outer steps", above=0)
    outer_momentum: float = number(0.9, "Nesterov momentum of the outer steps", least=0, below=1)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _DiLoCoWorker(self, replica, comm, optimizer, clip)


class _DiLoCoWorker(AveragedWorker):
    def __init__(
        self, strategy: DiLoCo, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(replica, comm, optimizer, clip)
        self._strategy = strategy
        self._anchors = [weights.clone() for weights in self.weights]
        self._velocities = [torch.zeros_like(weights) for weights in self.weights]

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.move()
        self.skip()

    @override
    @torch.no_grad()
    def skip(self) -> None:
        """Take part in the outer step that may follow a round."""
        self.rounds += 1
        if self.rounds % self._strategy.every == 0:
            self.meet(self.average.take)
            with self.updating:
                self._move_outer()

    def _move_outer(self) -> None:
        """Step from the anchor towards the average, which the weights are now."""
        lr, momentum = self._strategy.outer_lr, self._strategy.outer_momentum
        for weights, anchor, velocity in zip(self.weights, self._anchors, self._velocities, strict=True):
            move_outer(anchor, weights, velocity, lr, momentum)
            weights.copy_(anchor)

    @override
    def state(self) -> State:
        """Add anchors and velocities, which are the same on all ranks: each gives a slice."""
        state = super().state()
        kept = zip(self.replica.flats, self._anchors, self._velocities, strict=True)
        for flat, anchor, velocity in kept:
            own = equal_slices(flat, self.comm.size)[self.comm.rank]
            state.joint.pieces += pieces_of(ANCHOR, flat, anchor, own)
            state.joint.pieces += pieces_of(VELOCITY, flat, velocity, own)
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        """Go on in the middle of a round, or begin one at the weights that others have agreed on."""
        super().load_state(saved)
        fill_all(saved.joint.tensors, VELOCITY, self.replica.flats, self._velocities)
        if saved.alone is None:
            self.rounds = 0
        else:
            fill_all(saved.joint.tensors, ANCHOR, self.replica.flats, self._anchors)

    @override
    @torch.no_grad()
    def agree(self) -> None:
        """Overwrite the weights with the result of an outer step from here, without making it."""
        if self.rounds % self._strategy.every == 0:
            return
        kept = self._anchors, self._velocities
        self._anchors, self._velocities = ([vector.clone() for vector in vectors] for vectors in kept)
        self.average.take(self.weights)
        self._move_outer()
        self._anchors, self._velocities = kept


def move_outer(anchor: Tensor, average: Tensor, velocity: Tensor, lr: float, momentum: float) -> None:
    """One step of the outer optimizer, SGD with Nesterov's momentum, from an anchor towards an average.

        d = anchor - average             what the workers have done since the anchor, as a gradient
        v = momentum v + d
        anchor = anchor - lr (d + momentum v)

    Source: algorithm 1, lines 12 and 14, of the paper that `DiLoCo` names, with its section 2's optimizer.

    Args:
        anchor: where the workers began; overwritten.
        average: the mean of where they are now; overwritten.
        velocity: v, zeros at first; overwritten.
        lr: of the outer optimizer.
        momentum: of the outer optimizer; 0: plain SGD, which with lr 1 ends at the average.
    """
    delta = torch.sub(anchor, average, out=average)
    velocity.mul_(momentum).add_(delta)
    anchor.sub_(delta, alpha=lr).sub_(velocity, alpha=lr * momentum)
