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
    ways = _other_ways(targets)
    if ways:
        found = f"{float(targets.min()):g} to {float(targets.max()):g}"
        raise BadOption(
            f"the targets are floats from {found}, which may be labels or amounts; say what they are: "
            f"{', '.join(ways)}, or '--loss mse' for amounts"
        )
    return "mse"


def _other_ways(targets: Tensor) -> list[str]:
    """Return what floats may be other than amounts, as options."""
    if targets.numel() > len(targets) and are_flags(targets):
        return [
            "'--loss bce' for labels of which any number may hold",
            "'--loss cross_entropy' where one of them holds",
            "'--data.classes 2' where every position, such as a token, has a class",
        ]
    if targets.numel() > len(targets) and not_shares(targets) is None:
        return ["'--loss cross_entropy' for shares of classes"]
    values = torch.unique(targets)
    first, last, count = float(values[0]), float(values[-1]), len(values)
    if count < 2 or not torch.equal(values, values.floor()):
        return []
    if first in (0, 1) and last - first + 1 == count:
        classes = f"'--data.classes {last + 1:g}' for classes"
        return [classes, "'--loss bce' for labels of which any number may hold"] if last == 1 else [classes]
    return ["0 and 1 instead, as whole numbers, for two classes"] if count == 2 else []


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
