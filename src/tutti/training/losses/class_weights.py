"""The weights of classes in a loss, as given or by their counts."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from tutti.errors import BadOption

BALANCED: Final = "balanced"
"""The weights with which each class counts as much as any other."""


def given_weights(text: str) -> list[float]:
    """Return the weights that a text lists; empty for `BALANCED`.

    Raises:
        BadOption: it lists no finite numbers from 0, one of which is above 0.
    """
    if text == BALANCED:
        return []
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not any(weights) or not all(0 <= weight < math.inf for weight in weights):
        raise BadOption(
            f"--class-weights is '{text}'; give balanced, or one number from 0 for each class, separated by "
            "commas: 1,2.5"
        )
    return weights


def weights_of_classes(text: str, targets: Tensor, classes: int) -> Tensor:
    """Return the weight of each class, of shape (classes,), in float64.

    Balanced are samples / (classes that are there * samples of the class), as in scikit-learn; 1 of a class
    without samples.

    Args:
        text: `BALANCED`, or the weights.
        targets: class numbers of the training part, those that mean no label left out.
        classes: how many there are.

    Raises:
        BadOption: there are not as many weights as classes.
    """
    weights = given_weights(text)
    if weights:
        return _as_many(weights, classes, f"there are {classes} classes")
    counts = torch.bincount(targets.flatten().cpu(), minlength=classes).double()
    balanced = counts.sum() / ((counts > 0).sum() * counts)
    return balanced.where(counts > 0, 1.0)


def weights_of_flags(text: str, targets: Tensor) -> Tensor:
    """Return the weights of labels of 0 and of 1, in float64.

    Args:
        text: `BALANCED`, or the two weights, for all labels of a sample alike.
        targets: of the training part, of shape (samples, ...).

    Returns:
        Of shape (2,), or balanced (2, ...), for each label of a sample its own.

    Raises:
        BadOption: there are not two weights.
    """
    weights = given_weights(text)
    if weights:
        return _as_many(weights, 2, "a label is 0 or 1")
    held = targets.cpu().double().sum(0)
    counts = torch.stack([len(targets) - held, held])
    balanced = len(targets) / ((counts > 0).sum(0) * counts)
    return balanced.where(counts > 0, 1.0)


def _as_many(weights: list[float], count: int, reason: str) -> Tensor:
    if len(weights) != count:
        raise BadOption(
            f"--class-weights are {len(weights)} numbers, but {reason}; give {count}, or balanced"
        )
    return torch.tensor(weights, dtype=torch.float64)
