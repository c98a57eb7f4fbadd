"""Loops that people write; `LOOPS` has them by name."""

from tests.own_loop.loops import denominators, gradients, modules, optimizers, passes, several, weights
from tests.own_loop.loops.base import LOOPS

__all__ = ["LOOPS", "denominators", "gradients", "modules", "optimizers", "passes", "several", "weights"]
