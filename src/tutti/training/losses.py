"""Losses by name, and whether a model's outputs fit them.

A loss is the *mean* over the samples that it is given: only then can it be put together from the parts that
the ranks computed, weighted by their numbers of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from tutti.data.parts import DataSet
from tutti.errors import BadData, BadModel, BadOption, UnknownName
from tutti.imports import load_object, names_object

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> the mean over the samples, or one value for each sample."""

Fit = Callable[[Tensor, Tensor, int | None], str | None]
"""(outputs, targets, classes) -> the shape that the outputs should have, or None if they fit."""


@dataclass(frozen=True)
class Loss:
    """A loss with its name. Call it: (outputs, targets) -> scalar, the mean over the samples.

    Attributes:
        name: what messages call it.
        function: computes it.
        fit: says whether outputs fit targets.
        labels: whether integer targets are labels 0..outputs-1.
    """

    name: str
    function: LossFunction
    fit: Fit
    labels: bool = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the samples, a scalar."""
        value = self.function(outputs, targets)
        return value if value.dim() == 0 else value.mean()


def named_loss(spec: str | LossFunction, dataset: DataSet) -> Loss:
    """The loss that `spec` means.

    Args:
        spec: cross_entropy, nll, mse, l1, bce (on logits), package.module:function, file.py:function, or a
            callable. "auto" is cross_entropy for classes, mse for float targets. mse, l1 and bce take classes
            one-hot.
        dataset: the targets of its training part decide "auto".

    Raises:
        UnknownName: no loss has this name.
        BadOption: `spec` does not lead to a callable.
    """
    if not isinstance(spec, str):
        return _own_loss(spec)
    if spec == "auto":
        spec = "mse" if dataset.train.targets.is_floating_point() else "cross_entropy"
    check_loss(spec)
    return LOSSES[spec] if spec in LOSSES else _own_loss(load_object(spec, "loss"), spec)


def check_loss(spec: str) -> None:
    """Refuse a word that is no loss's name.

    Raises:
        UnknownName: there is no such loss.
    """
    if spec not in LOSSES and not names_object(spec):
        raise UnknownName("loss", spec, LOSSES, "Or give package.module:function or file.py:function.")


def fit_check(outputs: Tensor, targets: Tensor, loss: Loss, classes: int | None = None) -> None:
    """Refuse outputs that do not fit the loss.

    Args:
        outputs: the model's outputs for some samples.
        targets: the targets of these samples.
        loss: the loss that will be computed.
        classes: how many classes the data set has, or None.

    Raises:
        BadModel: the shapes do not fit, or the loss is no mean over the samples.
        BadData: a label lies outside 0..outputs-1.
    """
    wanted = loss.fit(outputs, targets, classes)
    if wanted is not None:
        raise BadModel(
            f"the model's outputs have shape {tuple(outputs.shape)} for targets of shape "
            f"{tuple(targets.shape)}; loss '{loss.name}' needs outputs of shape {wanted}: "
            f"change the model's last layer, or the loss"
        )
    if loss.labels and not targets.is_floating_point():
        check_labels(targets, outputs.shape[1])
    _check_mean(outputs, targets, loss)


def check_labels(targets: Tensor, outputs: int) -> None:
    """Refuse labels that a model with so many outputs cannot predict.

    Raises:
        BadData: a label lies outside 0..outputs-1.
    """
    low, high = (int(edge) for edge in targets.aminmax())
    if low < 0 or high >= outputs:
        raise BadData(
            f"labels go from {low} to {high}, but the model's {outputs} outputs stand for the labels "
            f"0 to {outputs - 1}; renumber the labels, or give the model more outputs"
        )


def align(outputs: Tensor, targets: Tensor) -> Tensor:
    """`targets` with the shape and dtype of `outputs`: labels one-hot, (n,) as (n, 1) and vice versa."""
    if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return functional.one_hot(targets, outputs.shape[1]).movedim(-1, 1).to(outputs.dtype)
    return targets.reshape(outputs.shape).to(outputs.dtype)


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, align(outputs, targets))


def _l1(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.l1_loss(outputs, align(outputs, targets))


def _bce(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, align(outputs, targets))


def _class_scores(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    """One score for each class: (n, classes, *rest) for labels (n, *rest) or probabilities of that shape."""
    if targets.is_floating_point():
        if targets.dim() < 2:
            return f"{_shape(targets, classes)} and whole-number labels as targets"
        return None if outputs.shape == targets.shape else str(tuple(targets.shape))
    enough = outputs.dim() >= 2 and outputs.shape[1] >= (classes or 1)
    if enough and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape):
        return None
    return _shape(targets, classes)


def _same_shape(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    """One number for each target, or for each class of each label."""
    if outputs.dim() and outputs.shape[0] == targets.shape[0] and outputs.numel() == targets.numel():
        return None
    if targets.is_floating_point():
        return str(tuple(targets.shape))
    return _class_scores(outputs, targets, classes)


def _anything(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    """A user's own loss knows itself what it takes; the outputs must have one row for each sample."""
    return None if outputs.dim() and outputs.shape[0] == targets.shape[0] else f"({targets.shape[0]}, ...)"


def _shape(targets: Tensor, classes: int | None) -> str:
    sizes = [str(targets.shape[0]), str(classes or "classes"), *map(str, targets.shape[1:])]
    return f"({', '.join(sizes)})"


def _own_loss(function: object, name: str = "") -> Loss:
    name = name or getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise BadOption(f"loss '{name}' is a {type(function).__name__}, not a function of (outputs, targets)")
    if isinstance(function, type):
        raise BadOption(f"loss '{name}' is a class, not a function of (outputs, targets); give {name}()")
    return Loss(name, cast("LossFunction", function), _anything)


def _check_mean(outputs: Tensor, targets: Tensor, loss: Loss) -> None:
    """A sum doubles when every sample is there twice; a mean stays."""
    with torch.no_grad():
        once = loss(outputs, targets)
        twice = loss(torch.cat([outputs, outputs]), torch.cat([targets, targets]))
    if once != 0 and torch.isclose(twice, 2 * once, rtol=1e-4, atol=0.0):
        raise BadOption(
            f"loss '{loss.name}' is a sum over the samples; make it their mean (reduction='mean')"
        )


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss("cross_entropy", functional.cross_entropy, _class_scores, labels=True),
    "nll": Loss("nll", functional.nll_loss, _class_scores, labels=True),
    "mse": Loss("mse", _mse, _same_shape),
    "l1": Loss("l1", _l1, _same_shape),
    "bce": Loss("bce", _bce, _same_shape),
}
