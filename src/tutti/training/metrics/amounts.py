"""Metrics of errors in amounts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from tutti.registry import part
from tutti.training.losses import align
from tutti.training.metrics.base import MeanMetric, Metric, built_in, made
from tutti.training.reading import AMOUNTS, FLAGS, Reading


@part("mae")
@built_in
def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error."""
    return (outputs - align(outputs, targets)).abs()


@part("mse")
@built_in
def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return (outputs - align(outputs, targets)).square()


@dataclass(frozen=True, kw_only=True)
class _Root(MeanMetric):
    @override
    def value(self, sums: Tensor, labels: int) -> float:
        return float(super().value(sums, labels) ** 0.5)


@part("rmse")
@made
def rmse() -> Metric:
    """Root of the mean squared error."""
    return _Root(name="rmse", better="lower", function=mse.function)


@dataclass(frozen=True, kw_only=True)
class Determination(Metric):
    """The coefficient of determination, the mean over the numbers of a target.

    Of each number: 1 - the sum of squared errors / that of squared deviations from the mean. As scikit-learn
    has it, it is 0 where all targets are equal and the outputs are not, and 1 where both are.

    Attributes:
        centre: about the mean of each number, of shape (numbers,), float64: deviations are summed from there,
            so that nothing is lost where the mean is large.
    """

    centre: Tensor | None = None

    @property
    @override
    def width(self) -> int:
        assert self.centre is not None
        return 3 * len(self.centre)

    @override
    def on(self, reading: Reading) -> Metric:
        super().on(reading)
        return replace(self, centre=reading.targets.cpu().reshape(len(reading.targets), -1).double().mean(0))

    @override
    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self.centre is not None
        wanted = targets.reshape(len(targets), -1).double()
        errors = outputs.reshape(wanted.shape).double() - wanted
        deviations = wanted - self.centre.to(wanted.device)
        return torch.stack([deviations.sum(0), deviations.square().sum(0), errors.square().sum(0)]).flatten()

    @override
    def value(self, sums: Tensor, labels: int) -> float:
        total, squares, errors = sums.view(3, -1)
        spread = squares - total.square() / labels
        # What rounding leaves of equal targets is none.
        spread = spread.where(spread > 1e-12 * squares, 0.0)
        constant = (errors > 0).double().neg()
        return float((1 + torch.where(spread > 0, -errors / spread, constant)).mean())


@part("r2")
@made
def r2() -> Metric:
    """Coefficient of determination, the mean over the numbers of a target."""
    return Determination(name="r2", better="higher", takes=(AMOUNTS, FLAGS))
