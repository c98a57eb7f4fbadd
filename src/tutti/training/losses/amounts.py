"""Losses on amounts: one number for each target."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, align, built_in, same_shape


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, align(outputs, targets))


def _l1(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.l1_loss(outputs, align(outputs, targets))


@part("mse")
@built_in
def mse() -> Loss:
    """Mean squared error; labels one-hot."""
    return Loss("mse", _mse, same_shape, amounts=True)


@part("l1")
@built_in
def l1() -> Loss:
    """Mean absolute error; labels one-hot."""
    return Loss("l1", _l1, same_shape, amounts=True)
