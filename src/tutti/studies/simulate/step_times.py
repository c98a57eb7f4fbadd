"""The distribution of the time of a forward and backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]

MOST_QUANTILES: Final = 101
"""The most quantiles that are kept: one for each percent."""


@dataclass(frozen=True)
class StepTimes:
    """A distribution of the seconds of one forward and backward pass.

    Synchronous workers wait for the slowest one, so a mean is not enough.

    Raises:
        ValueError: `quantiles_s` are fewer than 2, fall, or are not finite numbers of at least 0.
    """

    quantiles_s: tuple[float, ...]  # equally spaced, from the minimum to the maximum

    def __post_init__(self) -> None:
        values = self.quantiles_s
        falls = any(later < earlier for earlier, later in pairwise(values))
        if len(values) < 2 or falls or not all(0 <= value < math.inf for value in values):
            raise ValueError(f"quantiles_s is {values}; expected at least 2 rising finite numbers from 0 on")

    @classmethod
    def measured(cls, samples: Sequence[float]) -> StepTimes:
        """Return the distribution of at least one measurement, in seconds."""
        count = max(2, min(len(samples), MOST_QUANTILES))
        return cls(tuple(numpy.quantile(samples, numpy.linspace(0, 1, count)).tolist()))

    @property
    def median(self) -> float:
        """The median in seconds."""
        return float(self._at(0.5))

    def scaled(self, factor: float) -> StepTimes:
        """Return the same distribution with all times multiplied by `factor`."""
        return StepTimes(tuple(value * factor for value in self.quantiles_s))

    def sample(self, generator: Generator, shape: int | tuple[int, ...]) -> Floats:
        """Draw seconds of this shape, by the inverse of the distribution function."""
        return self._at(generator.random(shape))

    def _at(self, shares: Floats | float) -> Floats:
        last = len(self.quantiles_s) - 1
        return numpy.interp(numpy.multiply(shares, last), numpy.arange(last + 1), self.quantiles_s)
