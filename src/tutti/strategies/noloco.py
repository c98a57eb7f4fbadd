"""NoLoCo: many local steps of each worker, then an outer step in random pairs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.registry import part
from tutti.replica import Replica
from tutti.strategies.averaged import PeerStrategy
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import number, whole
from tutti.strategies.outer import OuterWorker

TAG: Final = 7350
"""The tag of the messages within a pair."""

ANCHOR: Final = "own_anchor"
"""The first word of the names of the weights at which a worker's round began, in a checkpoint."""

VELOCITY: Final = "own_velocity"
"""The first word of the names of a worker's outer momentum."""


@part("noloco")
@dataclass(frozen=True)
class NoLoCo(PeerStrategy):
    """DiLoCo without an all-reduce: outer steps join pairs of workers, different ones in each round.

        for t = 1, 2, ...:
            x_i = y_i                                        each worker begins at its own y_i
            `every` times:  x_i = optimizer(x_i, g_i)        with its own batches; the paper's is Adam
            d_i = y_i - x_i                                  its outer gradient
            v_i = outer_momentum v_i + outer_lr (d_i + d_j) / 2 + pull (y_i - y_j) / 2
            y_i = y_i - v_i                                  j is the other of the pair

    The last term of v_i keeps the replicas together, as no step makes them equal. All ranks draw the same
    pairs from `seed` and t. Only the two of a pair wait for each other:

        worker 0   │ step │ step │ ... │ outer step with 2 │ step │ step │ ... │ outer step with 1 │
        worker 1   │ step │ step │ ... │ outer step with 3 │ step │ step │ ... │ outer step with 0 │

    With an odd number of workers the odd one out makes its outer step alone, with j = i. The average of all
    workers is evaluated and kept; each worker keeps the states of both its optimizers.

    The paper has groups of n workers and means over a group; here n is 2, as in its experiments. In the
    authors' program (jkolehm/noloco) `pull` is `outer_lr`, the number of workers must be even, and each
    replica is evaluated separately. The paper also routes the activations of pipelines at random, which is
    not done here.

    Source: Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large
    Models", arXiv:2506.10911, section 3; there `every` is 50, `outer_momentum` is alpha, `outer_lr` beta and
    `pull` gamma.
    """

    every: int = whole(20, "batches of a worker between two outer steps")
    outer_lr: float = number(0.7, "learning rate of the outer steps", above=0)
    outer_momentum: float = number(0.5, "momentum of the outer steps", least=0, below=1)
    pull: float = number(0.7, "how hard the two of a pair pull at each other", least=0, most=1)
    seed: int = whole(0, "decides the pairs", least=0)

    @property
    @override
    def least_workers(self) -> int:
        return 2

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        self.check(comm.size)
        return _NoLoCoWorker(self, replica, comm, optimizer, clip)


class _NoLoCoWorker(OuterWorker[NoLoCo]):
    def __init__(
        self, strategy: NoLoCo, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self._velocities = [torch.zeros_like(weights) for weights in self.weights]
        self.common = {}
        self.private = {ANCHOR: self.anchors, VELOCITY: self._velocities}
        self.restarts += ("the outer momentum of each worker",)

    @override
    def exchange(self, vectors: list[Tensor]) -> int:
        """Make the outer step of a round from the weights `vectors`; returns the bytes sent."""
        one = self.strategy
        partner = partner_of(self.comm.rank, self.comm.size, self.rounds // one.every, one.seed)
        sent = 0
        for weights, anchor, velocity in zip(vectors, self.anchors, self._velocities, strict=True):
            mine = torch.cat([anchor - weights, anchor])
            theirs = mine
            if partner is not None:
                theirs = torch.empty_like(mine)
                self.comm.exchange(mine, partner, theirs, partner, TAG)
                sent += mine.nbytes
            with self.updating:
                move_in_pair(anchor, velocity, mine, theirs, one.outer_lr, one.outer_momentum, one.pull)
                weights.copy_(anchor)
        return sent


def partner_of(rank: int, size: int, turn: int, seed: int) -> int | None:
    """Return the other of a rank's randomly drawn pair in round `turn`; None for the odd one out."""
    order = order_of_pairs(size, turn, seed)
    place = order.index(rank) ^ 1
    return order[place] if place < size else None


def order_of_pairs(size: int, turn: int, seed: int) -> list[int]:
    """Return all ranks in the order of the round's pairs: the first two are a pair, the next two, ..."""
    order = list(range(size))
    Random(f"{seed}/{turn}").shuffle(order)
    return order


def move_in_pair(
    anchor: Tensor, velocity: Tensor, mine: Tensor, theirs: Tensor, lr: float, momentum: float, pull: float
) -> None:
    """Make one outer step of one worker of a pair, in place.

        v = momentum v + lr (d_i + d_j) / 2 + pull (y_i - y_j) / 2
        y_i = y_i - v

    `mine` is d_i and y_i, concatenated; `theirs` is d_j and y_j, or `mine` for the odd one out.

    Source: section 3 of the paper of `NoLoCo`, with groups of two; there the outer gradient and the velocity
    have the other sign, and the rates are beta, alpha and gamma.
    """
    (own, here), (other, there) = mine.chunk(2), theirs.chunk(2)
    velocity.mul_(momentum).add_(own + other, alpha=lr / 2).add_(here - there, alpha=pull / 2)
    anchor.sub_(velocity)
