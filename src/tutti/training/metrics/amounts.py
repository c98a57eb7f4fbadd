"""Metrics of errors in amounts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tutti.registry import part
from tutti.training.losses import align
from tutti.training.metrics.base import Metric, built_in, made, mean
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


@part("rmse")
@made
def rmse() -> Metric:
    """Root of the mean squared error."""
    return Metric(name="rmse", function=mse.function, figure=lambda sums, labels: mean(sums, labels) ** 0.5)


@part("r2")
@made
def r2() -> Metric:
    """Coefficient of determination, the mean over the numbers of a target."""

    def read(reading: Reading) -> Metric:
        # Deviations are summed from about the mean, so that nothing is lost where that is large.
        centre = reading.targets.cpu().reshape(len(reading.targets), -1).double().mean(0)
        function = partial(_deviations, centre)
        return replace(plain, function=function, width=3 * len(centre), figure=_determination)

    plain = Metric(name="r2", function=mse.function, takes=(AMOUNTS, FLAGS), read=read)
    return plain


def _deviations(centre: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = targets.reshape(len(targets), -1).double()
    errors = outputs.reshape(wanted.shape).double() - wanted
    deviations = wanted - centre.to(wanted.device)
    return torch.cat([deviations, deviations.square(), errors.square()], 1)


def _determination(sums: Tensor, labels: int) -> float:
    """As in scikit-learn, 0 where all targets are equal and the outputs are not, and 1 where both are."""
    total, squares, errors = sums.view(3, -1)
    spread = squares - total.square() / labels
    # What rounding leaves of equal targets is none.
    spread = spread.where(spread > 1e-12 * squares, 0.0)
    constant = (errors > 0).double().neg()
    return float((1 + torch.where(spread > 0, -errors / spread, constant)).mean())
