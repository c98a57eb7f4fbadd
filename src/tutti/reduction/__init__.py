"""Ways to sum a vector of gradients over ranks: exact, compressed, of low rank, adaptive."""

from __future__ import annotations

from tutti.reduction.adaptive import Adaptive
from tutti.reduction.base import Layer, Layout, Reduction
from tutti.reduction.compressed import Compressed
from tutti.reduction.low_rank import LowRank
from tutti.reduction.plain import ByMessages, Native

__all__ = ["Adaptive", "ByMessages", "Compressed", "Layer", "Layout", "LowRank", "Native", "Reduction"]
