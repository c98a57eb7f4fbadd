"""Binary cross entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, align, built_in, same_shape


def _outside(targets: Tensor) -> str | None:
    low, high = (float(edge) for edge in targets.aminmax())
    if low >= 0 and high <= 1:
        return None
    return (
        f"needs targets from 0 to 1, but they go from {low:g} to {high:g}; give --data.classes N if they are "
        "class numbers, or '--loss mse' for amounts"
    )


def _bce(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, align(outputs, targets))


@part("bce")
@built_in
def bce() -> Loss:
    """Binary cross entropy of logits, for labels of 0 or 1, of which any number may hold."""
    return Loss("bce", _bce, same_shape, floats=_outside)
