"""Loops that people write; `LOOPS` has them by name."""

from tests.own_loop.loops import (  # noqa: F401  Each names its loops.
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
from tests.own_loop.loops.base import LOOPS as LOOPS
