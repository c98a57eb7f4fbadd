"""The meaning of targets: the loss that goes with them, and the targets that each named loss takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from tutti.errors import BadData, BadOption

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


def _for_cross_entropy(targets: Tensor) -> str | None:
    reason = not_shares(targets)
    if reason is None:
        return None
    return (
        "needs class numbers, or shares of the classes that add up to 1 for each sample, but the targets are "
        f"floats, and {reason}; give --data.classes N if they are class numbers, '--loss bce' for labels of "
        "which any number may hold, or '--loss mse' for amounts"
    )


def _for_nll(targets: Tensor) -> str | None:
    return (
        "needs class numbers, but the targets are floats; give --data.classes N if they are class numbers, "
        "or another loss"
    )


def _for_bce(targets: Tensor) -> str | None:
    low, high = (float(edge) for edge in targets.aminmax())
    if low >= 0 and high <= 1:
        return None
    return (
        f"needs targets from 0 to 1, but they go from {low:g} to {high:g}; give --data.classes N if they are "
        "class numbers, or '--loss mse' for amounts"
    )


_FLOATS: Final[dict[str, Callable[[Tensor], str | None]]] = {
    "cross_entropy": _for_cross_entropy,
    "nll": _for_nll,
    "bce": _for_bce,
}
"""The checks of float targets by loss: the reason why it does not take them, or None."""


def check_floats(loss: str, targets: Tensor) -> None:
    """Refuse float targets that a built-in loss does not take.

    Args:
        loss: its name.
        targets: of a part of the data.

    Raises:
        BadData: it does not take them.
    """
    problem = _FLOATS[loss](targets) if loss in _FLOATS else None
    if problem is not None:
        raise BadData(f"loss '{loss}' {problem}")
