"""All-reduce algorithms, each written once from messages between two ranks."""

from __future__ import annotations

from tutti.allreduce import halving_doubling, hierarchical, ring, torus, tree
from tutti.allreduce.ranks import AllReduce, Counted, Hosts, Sent

ALGORITHMS: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "tree": tree.all_reduce,
    "hierarchical": hierarchical.all_reduce,
    "torus": torus.all_reduce,
}
"""The algorithms by name."""

__all__ = ["ALGORITHMS", "AllReduce", "Counted", "Hosts", "Sent"]
