"""Binary cross entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, align, built_in, same_shape


def outside(targets: Tensor) -> str | None:
    """Say why the loss does not take float targets: they are no labels or probabilities; None: it does."""
    low, high = (float(edge) for edge in targets.aminmax())
    if low >= 0 and high <= 1:
        return None
    return (
        f"needs targets from 0 to 1, but they go from {low:g} to {high:g}; give --data.classes N if they are "
        "class numbers, or '--loss mse' for amounts"
    )


def _bce(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, align(outputs, targets))


def of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross entropy of each label, of the targets' shape."""
    wanted = align(outputs, targets)
    return functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").view_as(targets)


@part("bce")
@built_in
def bce() -> Loss:
    """Binary cross entropy of logits, for labels of 0 or 1, of which any number may hold."""
    return Loss("bce", _bce, same_shape, floats=outside, each=of_each)
