"""Optimizers and learning-rate schedules by name, and the step on slices of the flat vectors."""

from __future__ import annotations

from tutti.optim.named import build
from tutti.optim.schedules import schedule

__all__ = ["build", "schedule"]
