"""Losses on labels that have their own denominator, and the weights of classes."""

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
from tutti.training.targets import spread

Weighed = tuple[Tensor, Tensor | float]
"""The sum of the losses, a scalar, and its weight: the mean is all sums / all weights."""

LossFunction = Callable[..., Tensor | Weighed]
"""(outputs, targets) -> the mean over the samples, one value for each sample, or a sum with its weight.

If its second parameter is `batch`, it gets the model's return value and a `LossBatch`.
"""


@dataclass(frozen=True)
class OfLabels:
    """A loss on class numbers, as a sum over the labels with the sum of their weights."""

    function: Callable[..., Tensor]  # in `FUNCTIONS`
    weight: Tensor | None = None  # of each class
    ignore_index: int = NO_LABEL  # the number that means "no label"
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the function

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Weighed:
        """Return the sum over the labels, and the sum of their weights; `weights` are the samples'."""
        weight = None if self.weight is None else self.weight.to(outputs)
        known = {"weight": weight, "ignore_index": self.ignore_index, **self.options}
        loss = self.function(outputs, targets, reduction="sum" if weights is None else "none", **known)
        # No shape may depend on the labels: 'tutti layouts' runs this on tensors without contents.
        counted = targets != self.ignore_index
        each = counted if weight is None else weight.double()[targets.where(counted, 0)].where(counted, 0)
        if weights is None:
            return loss, each.sum()
        (own,) = spread(targets, weights)
        return (loss * own.to(loss)).sum(), (each * own).sum()


FUNCTIONS: Final = {
    functional.cross_entropy: ("label_smoothing",),
    functional.nll_loss: (),
}
"""The losses on class numbers, with their options besides weight and ignore_index."""

_MODULES: Final = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
}
"""Losses as modules of torch, and their functions."""


def of_labels(function: object) -> OfLabels | None:
    """Return the `OfLabels` of a function, a partial or a torch module; None if it is another."""
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
    known = function in FUNCTIONS and options.pop("reduction", "mean") in ("mean", "none")
    if not known:
        return None
    function = cast("Callable[..., Tensor]", function)
    own = {name: options.pop(name) for name in FUNCTIONS[function] if name in options}
    return (
        OfLabels(function, **options, options=own) if options.keys() <= {"weight", "ignore_index"} else None
    )


BALANCED: Final = "balanced"
"""Weights that make all classes count equally."""


def given_weights(text: str) -> list[float]:
    """Return the listed weights, empty for `BALANCED`; BadOption for any other text."""
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

    Balanced are samples / (classes with samples * samples of the class), as in scikit-learn; 1 for a class
    without samples.
    """
    weights = given_weights(text)
    if not weights:
        counts = torch.bincount(targets.flatten().cpu(), minlength=classes).double()
        return (counts.sum() / ((counts > 0).sum() * counts)).where(counts > 0, 1.0)
    if len(weights) != classes:
        raise BadOption(
            f"--class-weights are {len(weights)} numbers, but there are {classes} classes; give one for each"
        )
    return torch.tensor(weights, dtype=torch.float64)
