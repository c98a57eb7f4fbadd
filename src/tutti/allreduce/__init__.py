"""Ways to sum a vector of gradients over ranks: exact, compressed, of low rank, adaptive."""

from __future__ import annotations

from tutti.allreduce.adasum import Adasum
from tutti.allreduce.base import GradientLayout, GradientReduction, Layer
from tutti.allreduce.compression import Compressed
from tutti.allreduce.exact import ByMessages, Native
from tutti.allreduce.powersgd import PowerSGD
from tutti.allreduce.ranks import AllReduce
from tutti.registry import Registry

ALGORITHMS: Registry[AllReduce] = Registry("tutti.allreduce", "all-reduce")
"""The all-reduces of messages between two ranks, by name: each file of this package with a `@part`."""

__all__ = [
    "ALGORITHMS",
    "Adasum",
    "ByMessages",
    "Compressed",
    "GradientLayout",
    "GradientReduction",
    "Layer",
    "Native",
    "PowerSGD",
]
