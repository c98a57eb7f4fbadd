"""Ways to sum a vector of gradients over ranks: exact, compressed, of low rank, adaptive."""

from __future__ import annotations

from tutti.allreduce.ranks import AllReduce
from tutti.registry import Registry

ALGORITHMS: Registry[AllReduce] = Registry("tutti.allreduce", "all-reduce")
"""The all-reduces of messages between two ranks, by name: each file of this package with a `@part`."""
