"""Decentralized SGD: workers average with their neighbours in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.registry import part
from tutti.replica import Replica
from tutti.strategies.averaged import AveragedWorker, PeerStrategy, WeightRows, mean
from tutti.strategies.base import Clip, Worker
from tutti.strategies.options import choice, whole

TAG: Final = 7301
"""Of the messages between neighbours."""


GRAPHS: Final = ("ring", "exponential", "all", "shift_one")
"""Graphs of workers that average: see `links`."""


@part("gossip")
@dataclass(frozen=True)
class Gossip(PeerStrategy):
    """Decentralized parallel SGD (D-PSGD): each worker averages with its neighbours only.

        x_i = sum over j of W_ij x_j                       in every `every`-th step
        x_i = optimizer(x_i, g_i)                          g_i from x_i before the averaging

    W is doubly stochastic: 1 / (1 + neighbours) for a worker and each of its neighbours, else 0. `graph`:

        ring          0 - 1 - 2 - 3 - 0           the two adjacent ranks
        exponential   0 -> 1, 2, 4, ...           the ranks 1, 2, 4, ... places on
        all           0 - 1, 2, 3                 all ranks
        shift_one     0 - 2, then 0 - 3, ...      one rank, a different one each time

    Each worker has its own batches and its own optimizer state, which is never averaged. The average of all
    workers is evaluated and kept.

        worker 0   backward │ x0 ─┐     ┌─ x0 = (x0 + x1 + x3) / 3 │ step
        worker 1   backward │ x1 ─┼──>──┼─ x1 = (x1 + x0 + x2) / 3 │ step
        worker 2   backward │ x2 ─┘     └─ x2 = (x2 + x1 + x3) / 3 │ step

    The paper averages in every step (`every` 1), while the gradient is computed; here it follows.

    On one host the neighbours' rows in shared memory are read; between hosts weights are sent.

    Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study
    for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, algorithm 1.
    """

    graph: str = choice("ring", "who averages with whom", GRAPHS)
    every: int = whole(1, "batches of a worker between two averagings")

    @property
    @override
    def least_workers(self) -> int:
        return 2 if self.graph == "shift_one" else 1

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _GossipWorker(self, replica, comm, optimizer, clip)


class _GossipWorker(AveragedWorker[Gossip]):
    def __init__(
        self, strategy: Gossip, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self._rows = self.average.rows
        if self._rows is None and comm.hosts == 1 and comm.size > 1 and strategy.graph != "all":
            self._rows = WeightRows(comm, self.weights)

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.skip()
        self.move()

    @override
    def exchange(self, vectors: list[Tensor]) -> int:
        """Average the weights with the neighbours'; returns the bytes sent."""
        if self.strategy.graph == "all":
            return self.average.take(vectors)
        step = self.rounds // self.strategy.every - 1
        pairs = links(self.strategy.graph, self.comm.rank, self.comm.size, step)
        if self._rows is None:
            return sum(self._mix_by_messages(weights, pairs) for weights in vectors)
        for weights, rows in zip(vectors, self._rows.publish(vectors), strict=True):
            mean(weights, [weights, *(rows[source] for _, source in pairs)])
        return sum(weights.nbytes for weights in vectors)

    def _mix_by_messages(self, weights: Tensor, pairs: list[tuple[int, int]]) -> int:
        incoming = [torch.empty_like(weights) for _ in pairs]
        for (to, source), vector in zip(pairs, incoming, strict=True):
            self.comm.exchange(weights, to, vector, source, TAG)
        mean(weights, [weights, *incoming])
        return weights.nbytes * len(pairs)


def links(graph: str, rank: int, size: int, step: int) -> list[tuple[int, int]]:
    """Return pairs (to, source): the ranks that a rank exchanges weights with, in turn, when it mixes.

    Each averages with weight 1 / (1 + number of its links). The mixing matrix is doubly stochastic in every
    step: each graph is a symmetric circle, or consists of pairs. "exponential" is the graph of Assran et al.
    2019, arXiv:1811.10792, section 3. In "shift_one" one rank of an odd number rests; `step` counts earlier
    mixings.
    """
    if graph == "shift_one":
        partner = _partner(rank, size, step)
        return [] if partner is None else [(partner, partner)]
    if graph == "ring":
        hops = [1, -1] if size > 2 else [1]
    elif graph == "exponential":
        hops = [1 << power for power in range((size - 1).bit_length())]
    else:
        hops = list(range(1, size))
    return [((rank + hop) % size, (rank - hop) % size) for hop in hops] if size > 1 else []


def _partner(rank: int, size: int, step: int) -> int | None:
    """Return the other of a pair; the first half's k-th rank meets the second half's (k + step)-th."""
    half = (size + 1) // 2
    if rank >= half:
        return (rank - half - step) % half
    other = half + (rank + step) % half
    return other if other < size else None
