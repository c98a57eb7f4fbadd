"""All-reduce in two levels: inside each host, and between the hosts' first ranks."""

from __future__ import annotations

from torch import Tensor

import tutti.allreduce.ring as ring
from tutti.allreduce.ranks import Ranks
from tutti.comm.base import cut
from tutti.registry import part


@part("hierarchical")
def all_reduce(comm: Ranks, vector: Tensor) -> None:
    """Sum `vector` inside each host, then between the hosts' first ranks, and hand the sum down, in place.

        host a   0 1 2 ─ sum to 0 ─┐            ┌─ 0 to all
                                   ├─ ring 0, 3 ┤
        host b   3 4 5 ─ sum to 3 ─┘            └─ 3 to all

    With k ranks on each of h hosts: 4 (k - 1) + 2 (h - 1) steps on a host's first rank, where a ring takes
    2 (h k - 1), and one rank alone uses the link between the hosts. Sum and hand-down go in slices: 2 (k - 1)
    steps each. A first rank sends 4 (k - 1)/k + 2 (h - 1)/h of the vector's bytes, any other 3 (k - 1)/k.
    Hosts may have different numbers of ranks.

    Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision: Training
    ImageNet in Four Minutes", arXiv 1807.11205 (hierarchical all-reduce).
    """
    node = comm.node
    ring.all_reduce(node, vector)
    if node.rank == 0 and comm.cross is not None:
        ring.all_reduce(comm.cross, vector)
    _scatter(node, vector)
    ring.all_gather(node, vector)


def _scatter(node: Ranks, vector: Tensor) -> None:
    """Bring every rank its slice from rank 0."""
    slices = cut(len(vector), node.size)
    if node.rank:
        node.recv(vector[slices[node.rank]], 0)
        return
    for other in range(1, node.size):
        node.send(vector[slices[other]], other)
