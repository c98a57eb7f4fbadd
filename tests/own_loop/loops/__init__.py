"""Loops that people write; `LOOPS` has them by name."""

from tests.own_loop.loops import (
    denominators,
    fields,
    gradients,
    modules,
    optimizers,
    passes,
    several,
    structures,
    weights,
)
from tests.own_loop.loops.base import LOOPS

__all__ = [
    "LOOPS",
    "denominators",
    "fields",
    "gradients",
    "modules",
    "optimizers",
    "passes",
    "several",
    "structures",
    "weights",
]
