"""The record of an ensemble: how the outputs of its members are combined. Needs neither torch nor MPI."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from tutti.records.json_lines import Record


@dataclass(frozen=True)
class Combination(Record):
    """The way from the values of candidates to those of their ensemble.

    A value is a probability, or an amount.

    Attributes:
        method: by which it was found.
        candidates: their names.
        weights: of each; they add up to 1. Empty where there are coefficients instead.
        coefficients: of shape (numbers, candidates x numbers), of a linear model of all values side by side;
            for classes, softmax makes probabilities of what it gives.
        intercepts: likewise.
    """

    method: str
    candidates: tuple[str, ...]
    weights: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...] = ()
    intercepts: tuple[float, ...] = ()

    @override
    def check(self) -> None:
        """Raise ValueError if the numbers are not those of these candidates."""
        count = len(self.candidates)
        numbers = [*self.weights, *self.intercepts, *(x for line in self.coefficients for x in line)]
        if not count or not all(map(math.isfinite, numbers)):
            raise ValueError("a combination needs candidates and finite numbers")
        if self.weights:
            fits = len(self.weights) == count and not self.coefficients and min(self.weights) >= 0
            if not fits or not math.isclose(sum(self.weights), 1, rel_tol=1e-9):
                raise ValueError("the weights are not one for each candidate, adding up to 1")
            return
        lengths = {len(line) for line in self.coefficients}
        if len(self.intercepts) != len(self.coefficients) or lengths != {count * len(self.intercepts)}:
            raise ValueError("the coefficients are not those of these candidates")
