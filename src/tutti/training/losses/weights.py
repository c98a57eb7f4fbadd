"""Losses on labels as a sum with its weight, where the denominator is not the number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.data.targets import NO_LABEL
from tutti.errors import BadOption

Weighed = tuple[Tensor, Tensor | float]
"""The sum of the losses, a scalar, and the weight by which all sums together are to be divided."""

LossFunction = Callable[..., Tensor | Weighed]
"""(outputs, targets) -> the mean over the samples, one value for each sample, or a sum with its weight.

If its second parameter is called `batch`, it gets all that the model returns, and a `LossBatch`.
"""


@dataclass(frozen=True)
class OfLabels:
    """A loss on class numbers, as a sum over the labels with the sum of their weights.

    Attributes:
        function: of `FUNCTIONS`.
        weight: of each class; None: 1.
        ignore_index: the label that means that there is none.
        options: further arguments of the function.
    """

    function: Callable[..., Tensor]
    weight: Tensor | None = None
    ignore_index: int = NO_LABEL
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Weighed:
        """Return the sum over the labels, and the sum of their weights."""
        weight = None if self.weight is None else self.weight.to(outputs)
        total = self.function(
            outputs, targets, weight=weight, ignore_index=self.ignore_index, reduction="sum", **self.options
        )
        # No shape may depend on the labels: 'tutti layouts' runs this on tensors without contents.
        counted = targets != self.ignore_index
        if weight is None:
            return total, counted.sum()
        return total, weight.double()[targets.where(counted, 0)].where(counted, 0).sum()


@dataclass(frozen=True)
class OfFlags:
    """A loss on labels of 0 or 1, as a sum over the labels with the sum of their weights.

    Attributes:
        each: the loss of each label.
        weights: of 0 and of 1: of shape (2,), or (2, ...) with one for each label of a sample.
    """

    each: Callable[[Tensor, Tensor], Tensor]
    weights: Tensor

    def __call__(self, outputs: Tensor, targets: Tensor) -> Weighed:
        """Return the sum over the labels, and the sum of their weights."""
        of_unset, of_set = self.weights.to(targets)
        weights = of_set.where(targets > 0, of_unset)
        return (self.each(outputs, targets) * weights).sum(), weights.double().sum()


FUNCTIONS: Final = {
    functional.cross_entropy: ("label_smoothing",),
    functional.nll_loss: (),
}
"""The losses on class numbers, with their options besides weight and ignore_index."""

_MODULES: Final = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
}
"""Those of torch as modules, and the function that each computes."""


def of_labels(function: object) -> OfLabels | None:
    """Return a mean over labels with its options; None for another function."""
    options: dict[str, Any] = {}
    if isinstance(function, OfLabels):
        return function
    if isinstance(function, partial):
        options = dict(function.keywords)
        function = None if function.args else function.func
    elif type(function) in _MODULES:
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        options = {name: getattr(function, name) for name in names if hasattr(function, name)}
        function = _MODULES[type(function)]
    known = function in FUNCTIONS and options.pop("reduction", "mean") == "mean"
    if not known:
        return None
    function = cast("Callable[..., Tensor]", function)
    own = {name: options.pop(name) for name in FUNCTIONS[function] if name in options}
    return (
        OfLabels(function, **options, options=own) if options.keys() <= {"weight", "ignore_index"} else None
    )


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
    if not any(weights) or not all(0 <= weight < math.inf for weight in weights):
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
        return _for(classes, weights)
    counts = torch.bincount(targets.flatten().cpu(), minlength=classes)
    return _balanced(counts.double())


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
        return _for(2, weights)
    held = targets.cpu().double().sum(0)
    return _balanced(torch.stack([len(targets) - held, held]))


def _for(classes: int, weights: list[float]) -> Tensor:
    if len(weights) != classes:
        raise BadOption(
            f"--class-weights are {len(weights)} numbers, but there are {classes} classes; give one for each"
        )
    return torch.tensor(weights, dtype=torch.float64)


def _balanced(counts: Tensor) -> Tensor:
    return (counts.sum(0) / ((counts > 0).sum(0) * counts)).where(counts > 0, 1.0)
