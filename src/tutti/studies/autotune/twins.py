"""A test whether the loss in another precision follows that of fp32, by short trainings. Needs no torch.

    order 0   fp32 ────╮ loss 0.613       bf16 ────╮ 0.611      difference -0.002
    order 1   fp32 ───╮  loss 0.640       bf16 ───╮  0.645      difference +0.005
    order 2   fp32 ────╮ loss 0.598       bf16 ────╮ 0.599      difference +0.001
              spread of fp32 0.021                              deviation 0.003: it follows

All trainings begin with the same weights. The trainings of a row are twins: they see the same batches, draw
the same dropout, and differ in the precision alone. Their loss is measured on the same samples afterwards.

With fp32's losses l_k and its twin's l_k + d_k over K orders of the batches, bf16 follows if

    sqrt(mean d_k^2) <= s = sqrt(sum (l_k - mean l)^2 / (K - 1))

so rounding may change the loss as much as another order of the batches does. With K = 3 and normal losses,
s^2 / sigma^2 is exponential with mean 1: a loss that is worse by c sigma passes with probability exp(-c^2).
The loss must have fallen by more than s, as a training that learns nothing shows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

REMEDY: Final = "give 'tutti plan' a larger --budget, and --plan auto remembers what it finds"
"""Advice if the time is too short."""

ORDERS: Final = 3
"""The number of orders of the batches."""

LEAST_UPDATES: Final = 20
"""A shorter training shows nothing: the first updates of most optimizers differ from later ones."""

MOST_UPDATES: Final = 100
"""A longer training shows no more: rounding that spoils a training does so in each update."""


@dataclass(frozen=True)
class Twins:
    """The losses of short trainings in fp32, and of their twins in another precision."""

    precision: str  # of the twins
    updates: int = 0  # of each training
    before: float = math.nan  # the loss before the first update
    reference: tuple[float, ...] = ()  # the final losses in fp32, one for each order of the batches
    twins: tuple[float, ...] = ()  # the final losses in the other precision
    problem: str = ""  # why there is nothing to compare

    @property
    def deviation(self) -> float:
        """The root of the mean square of the differences between twins."""
        pairs = zip(self.twins, self.reference, strict=True)
        return math.sqrt(fmean((twin - loss) ** 2 for twin, loss in pairs))

    @property
    def spread(self) -> float:
        """The standard deviation over the orders of the batches, in fp32."""
        return stdev(self.reference)

    @property
    def learned(self) -> bool:
        """True if fp32's loss has fallen by more than it varies."""
        return self.before - fmean(self.reference) > self.spread

    @property
    def follows(self) -> bool:
        """True if the precision may be chosen."""
        return not self.problem and self.learned and self.deviation <= self.spread

    def why(self) -> str:
        """Return the reason for the verdict, as a clause."""
        if self.problem:
            return self.problem
        loss = abs(fmean(self.reference)) or 1.0
        deviation, spread = f"{self.deviation / loss:.2%}", f"{self.spread / loss:.2%}"
        if not self.learned:
            return (
                f"in {self.updates} updates fp32's loss fell by less than the {spread} between "
                "orders of batches"
            )
        verdict = "no more than" if self.follows else "more than"
        return (
            f"after {self.updates} updates its loss differs from fp32's by {deviation}, {verdict} the "
            f"{spread} of another order of the batches ({len(self.reference)} orders)"
        )

    def as_json(self) -> dict[str, object]:
        """Return all of it as JSON values."""
        figures = {"deviation": self.deviation, "spread": self.spread} if not self.problem else {}
        return {**vars(self), **figures, "follows": self.follows, "why": self.why()}


def updates_within(seconds: float, update_s: float, run: int) -> int:
    """Return the updates of each training, at most `run`; an update in both precisions takes `update_s`."""
    # A tenth is for building the models and measuring the losses.
    return min(MOST_UPDATES, run, int(0.9 * seconds / (ORDERS * max(update_s, 1e-9))))
