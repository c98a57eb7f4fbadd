"""Metrics of errors in amounts."""

from __future__ import annotations

from torch import Tensor

from tutti.registry import part
from tutti.training.losses import align
from tutti.training.metrics import built_in


@part("mae")
@built_in(better="lower")
def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error."""
    return (outputs - align(outputs, targets)).abs()


@part("mse")
@built_in(better="lower")
def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return (outputs - align(outputs, targets)).square()
