"""Optimizers and learning-rate schedules by name, and the step on slices of the flat vectors."""

from __future__ import annotations

from tutti.optim.named import OPTIMIZERS, build
from tutti.optim.schedules import SCHEDULES, schedule
from tutti.optim.sharded import ShardedOptimizer

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "ShardedOptimizer",
    "build",
    "schedule",
]
