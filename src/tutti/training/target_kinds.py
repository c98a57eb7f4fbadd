"""The meaning of targets, and the loss that goes with them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tutti.errors import BadOption

ROUNDING: Final = 1e-3
"""The most by which the shares of a sample may miss 1."""


def loss_for(targets: Tensor) -> str:
    """Return the name of the loss that goes with targets.

    Args:
        targets: of the training part.

    Raises:
        BadOption: they may be meant as numbers or as labels.
    """
    if not targets.is_floating_point():
        return "cross_entropy"
    doubt = _doubt(targets)
    if doubt is not None:
        raise BadOption(f"{doubt}, or '--loss mse' for amounts")
    return "mse"


def _doubt(targets: Tensor) -> str | None:
    """Say what floats may be other than amounts, and how to tell tutti; None: nothing else."""
    numbers = targets.numel() // len(targets)
    if numbers > 1 and are_flags(targets):
        return (
            f"the targets are {numbers} numbers for each sample, all 0 or 1, which may be labels or amounts; "
            "say what they are: '--loss bce' for labels of which any number may hold, '--loss cross_entropy' "
            "where one of them holds, '--data.classes 2' where every position, such as a token, has a class"
        )
    if numbers > 1 and not_shares(targets) is None:
        return (
            f"the targets are {numbers} numbers for each sample, which add up to 1 and may be shares of "
            "classes or amounts; say what they are: '--loss cross_entropy' for shares"
        )
    if not torch.equal(targets, targets.floor()):
        return None
    values = torch.unique(targets)
    first, last, count = int(values[0]), int(values[-1]), len(values)
    if count > 1 and (first, last) == (0, 1):
        return (
            "the targets are floats, but all 0 or 1, which may be labels or amounts; say what they are: "
            "'--loss bce' for a label that holds or not (one output), '--data.classes 2' for two classes "
            "(two outputs)"
        )
    if count > 1 and first in (0, 1) and last - first + 1 == count:
        return (
            f"the targets are floats, but all whole, each of {first} to {last}, which may be class numbers "
            f"or amounts; say what they are: '--data.classes {last + 1}' for classes"
        )
    if count == 2:
        return (
            f"the targets are floats, but all {first} or {last}, which may be two classes or amounts; say "
            "what they are: 0 and 1 instead, as whole numbers, for classes"
        )
    return None


def are_flags(targets: Tensor) -> bool:
    """Tell whether float targets are all 0 or 1, one or several for each sample."""
    return bool(((targets == 0) | (targets == 1)).all())


def not_shares(targets: Tensor) -> str | None:
    """Say why float targets are no shares of classes, of shape (n, classes, *rest); None: they are."""
    if targets.dim() < 2 or targets.shape[1] < 2:
        return "there is one number for each sample"
    below = (targets < 0).flatten(1).any(1)
    if below.any():
        return f"sample {int(below.int().argmax())} has one below 0"
    off = ((targets.sum(1, dtype=torch.float64) - 1).abs() > ROUNDING).reshape(len(targets), -1).any(1)
    if off.any():
        return f"those of sample {int(off.int().argmax())} do not add up to 1"
    return None
