"""Losses on amounts: one number for each target."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, align, built_in, check_option, same_shape


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, align(outputs, targets))


def _huber(delta: float, outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.huber_loss(outputs, align(outputs, targets), delta=delta)


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


@part("huber")
@built_in
def huber(delta: float = 1.0) -> Loss:
    """Huber loss: half the square of errors below delta, and delta times larger ones; labels one-hot.

    Huber: Robust Estimation of a Location Parameter, Annals of Mathematical Statistics 35, 1964.
    """
    check_option("huber", "delta", delta, 1e-9)
    return Loss("huber", partial(_huber, delta), same_shape, amounts=True)
