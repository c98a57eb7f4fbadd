"""The built-in losses."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, align, built_in
from tutti.training.losses.weights import LossFunction
from tutti.training.targets import not_shares


def _no_shares(targets: Tensor) -> str | None:
    reason = not_shares(targets)
    if reason is None:
        return None
    return (
        "needs class numbers, or shares of the classes that add up to 1 for each sample, but the targets are "
        f"floats, and {reason}; give --data.classes N if they are class numbers, '--loss bce' for labels of "
        "which any number may hold, or '--loss mse' for regression"
    )


def _no_labels(targets: Tensor) -> str | None:
    return "needs class numbers, but the targets are floats; give --data.classes N, or another loss"


def _no_flags(targets: Tensor) -> str | None:
    low, high = (float(edge) for edge in targets.aminmax())
    if low >= 0 and high <= 1:
        return None
    return (
        f"needs targets from 0 to 1, but they go from {low:g} to {high:g}; give --data.classes N if they are "
        "class numbers, or '--loss mse' for regression"
    )


@part("cross_entropy")
@built_in
def cross_entropy(smoothing: float = 0.0) -> Loss:
    """Cross entropy of class scores (logits); labels, which may be smoothed, or shares of the classes."""
    function: LossFunction = functional.cross_entropy
    if smoothing:
        function = partial(functional.cross_entropy, label_smoothing=smoothing)
    return Loss("cross_entropy", function, floats=_no_shares)


@part("nll")
@built_in
def nll() -> Loss:
    """Negative log-likelihood of logarithms of probabilities."""
    return Loss("nll", functional.nll_loss, floats=_no_labels)


def _aligned(loss: LossFunction, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Any:
    return loss(outputs, align(outputs, targets), reduction=reduction)


@part("bce")
@built_in
def bce() -> Loss:
    """Binary cross entropy of logits, for labels of 0 or 1."""
    function = partial(_aligned, functional.binary_cross_entropy_with_logits)
    return Loss("bce", function, floats=_no_flags, flags=True)


@part("mse")
@built_in
def mse() -> Loss:
    """Mean squared error; labels one-hot."""
    return Loss("mse", partial(_aligned, functional.mse_loss), amounts=True)


@part("l1")
@built_in
def l1() -> Loss:
    """Mean absolute error; labels one-hot."""
    return Loss("l1", partial(_aligned, functional.l1_loss), amounts=True)
