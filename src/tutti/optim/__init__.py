"""Optimizers and learning-rate schedules by name, and the step on slices of the flat vectors."""

from __future__ import annotations

from tutti.optim.lamb import LAMB
from tutti.optim.lars import LARS
from tutti.optim.linear_scaling import LinearScalingLR
from tutti.optim.named import OPTIMIZERS, build
from tutti.optim.rmsprop_warmup import RMSpropWarmup
from tutti.optim.schedules import SCHEDULES, schedule
from tutti.optim.sharded import ShardedOptimizer

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SCHEDULES",
    "LinearScalingLR",
    "RMSpropWarmup",
    "ShardedOptimizer",
    "build",
    "schedule",
]
