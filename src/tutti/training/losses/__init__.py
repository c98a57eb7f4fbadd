"""Losses by name, and whether a model's outputs fit them.

A loss is a mean, which is put together from the parts of a batch that ranks and passes computed:

    loss = sum over the parts of total_part / sum over the parts of weight_part

For most losses the weight of a part is its number of samples, which every rank knows of all parts. Others
have a denominator of their own: cross entropy with `ignore_index` or with class weights divides by the
weights of the labels that are there, a mean over tokens by their number. They give their sum and its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.data.parts import DataSet
from tutti.data.targets import NO_LABEL
from tutti.errors import BadData, BadModel, BadOption
from tutti.registry import Registry
from tutti.training.target_kinds import loss_for

Weighed = tuple[Tensor, Tensor | float]
"""The sum of the losses, a scalar, and the weight by which all sums together are to be divided."""

LossFunction = Callable[[Tensor, Tensor], Tensor | Weighed]
"""(outputs, targets) -> the mean over the samples, one value for each sample, or a sum with its weight."""

Fit = Callable[[Tensor, Tensor, int | None], str | None]
"""(outputs, targets, classes) -> the shape that the outputs should have, or None if they fit."""


LOSSES: Registry[Loss] = Registry(
    "tutti.training.losses", "loss", "Or give package.module:function or file.py:function."
)
"""The built-in losses."""


@dataclass(frozen=True)
class Loss:
    """A loss with its name. Call it: (outputs, targets) -> scalar, the sum of the losses / the samples.

    That is the mean over the samples, but for losses with a denominator of their own.

    Attributes:
        name: its name in messages.
        function: computes it.
        fit: says whether outputs fit targets.
        labels: whether integer targets are labels 0..outputs-1.
        ignored: the label that means that there is none; such samples count in no metric. None: every label
            counts.
        weighed: whether the loss has a denominator of its own, so that `function` gives a sum and its weight.
        amounts: whether a single output approaches the class number itself, and is no logit.
        floats: says why the loss does not take float targets, or None if it does; None: it takes all.
    """

    name: str
    function: LossFunction
    fit: Fit
    labels: bool = False
    ignored: int | None = None
    weighed: bool = False
    amounts: bool = False
    floats: Callable[[Tensor], str | None] | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses / the samples, a scalar."""
        return self._measured(outputs, targets)[0]

    def measure(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Return the sum of the losses / the samples, a scalar, and the weight of these samples.

        The mean over several parts is the sum of value * samples over all of them / the sum of their weights.
        """
        value, weight = self._measured(outputs, targets)
        return value, float(weight)

    def _measured(self, outputs: Tensor, targets: Tensor) -> Weighed:
        found = self.function(outputs, targets)
        if isinstance(found, tuple):
            total, weight = found
            return total / len(targets), weight
        return found if found.dim() == 0 else found.mean(), len(targets)


def named_loss(spec: str | LossFunction, dataset: DataSet) -> Loss:
    """Return the loss that `spec` means.

    Args:
        spec: a name in `LOSSES`, package.module:function, file.py:function, or a callable, such as a module
            of torch. "auto" is cross_entropy for classes, mse for float targets
            that look like nothing else. mse, l1 and bce take classes one-hot.
        dataset: the targets of its training part decide "auto"; whether any part has samples without a label
            decides what cross entropy divides by.

    Raises:
        UnknownName: no loss has this name.
        BadOption: `spec` does not lead to a callable; or it is "auto", and the targets may be meant as
            numbers or as labels.
        BadData: there are samples without a label, and the loss needs one of each; or the targets are floats
            that it does not take.
    """
    if not isinstance(spec, str):
        return _own_loss(spec, dataset)
    if spec == "auto":
        spec = loss_for(dataset.train.targets)
    found = LOSSES.load(spec)
    return _on(dataset, found) if isinstance(found, Loss) else _own_loss(found, dataset, spec)


def fit_check(outputs: Tensor, targets: Tensor, loss: Loss, classes: int | None = None) -> Loss:
    """Refuse outputs that do not fit the loss.

    Args:
        outputs: the model's outputs for some samples.
        targets: the targets of these samples.
        loss: the loss that will be computed.
        classes: how many classes the data set has, or None.

    Returns:
        The loss, which knows now whether it has a denominator of its own.

    Raises:
        BadModel: the shapes do not fit.
        BadOption: the loss is neither a mean over the samples nor a sum with its weight.
    """
    wanted = loss.fit(outputs, targets, classes)
    if wanted is not None:
        raise BadModel(
            f"the model's outputs have shape {tuple(outputs.shape)} for targets of shape "
            f"{tuple(targets.shape)}; loss '{loss.name}' needs outputs of shape {wanted}: "
            f"change the model's last layer, or the loss"
        )
    with torch.no_grad():
        found = loss.function(outputs, targets)
    if not isinstance(found, Tensor | tuple):
        raise BadOption(
            f"loss '{loss.name}' gives a {type(found).__name__}; give a tensor: the mean over the samples, "
            "or one value for each"
        )
    if isinstance(found, tuple):
        _refuse_other_pairs(found, loss)
        return replace(loss, weighed=True)
    _refuse_sum(outputs, targets, loss)
    return loss


def check_labels(targets: Tensor, outputs: int, ignored: int | None = None) -> None:
    """Refuse labels that a model with `outputs` outputs cannot predict.

    Args:
        targets: the labels.
        outputs: the number of the model's outputs.
        ignored: the label that means that there is none.

    Raises:
        BadData: a label lies outside 0..outputs-1.
    """
    if ignored is not None:
        targets = targets[targets != ignored]
        if not targets.numel():
            return
    low, high = (int(edge) for edge in targets.aminmax())
    if low < 0 or high >= outputs:
        has = (
            "1 output, for the label 0"
            if outputs == 1
            else f"{outputs} outputs, for the labels 0 to {outputs - 1}"
        )
        two = ", or use the loss 'bce' for two classes" if outputs == 1 and (low, high) == (0, 1) else ""
        raise BadData(
            f"labels go from {low} to {high}, but the model has {has}; renumber the labels, or give "
            f"the model more outputs{two}"
        )


def built_in(make: Callable[[], Loss]) -> Loss:
    """Make a loss of the registry where its function is defined: the decorator below `@part`."""
    return make()


def align(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return `targets` with the shape and dtype of `outputs`: labels one-hot, (n,) as (n, 1) and back."""
    if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return functional.one_hot(targets, outputs.shape[1]).movedim(-1, 1).to(outputs.dtype)
    return targets.reshape(outputs.shape).to(outputs.dtype)


def class_scores(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    """One score for each class: (n, classes, *rest) for labels (n, *rest) or probabilities of that shape."""
    if targets.is_floating_point():
        if targets.dim() < 2:
            return f"{_shape(targets, classes)} and whole-number labels as targets"
        return None if outputs.shape == targets.shape else str(tuple(targets.shape))
    enough = outputs.dim() >= 2 and outputs.shape[1] >= (classes or 1)
    if enough and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape):
        return None
    return _shape(targets, classes)


def same_shape(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    """One number for each target, or for each class of each label."""
    if outputs.dim() and outputs.shape[0] == targets.shape[0] and outputs.numel() == targets.numel():
        return None
    if targets.is_floating_point():
        return str(tuple(targets.shape))
    return class_scores(outputs, targets, classes)


def _anything(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    """A user's own loss knows itself what it takes; the outputs must have one row for each sample."""
    return None if outputs.dim() and outputs.shape[0] == targets.shape[0] else f"({targets.shape[0]}, ...)"


def _shape(targets: Tensor, classes: int | None) -> str:
    sizes = [str(targets.shape[0]), str(classes or "classes"), *map(str, targets.shape[1:])]
    return f"({', '.join(sizes)})"


@dataclass(frozen=True)
class _OfLabels:
    """A loss of torch on labels, as a sum over the labels with the sum of their weights.

    Attributes:
        function: cross_entropy or nll_loss.
        weight: of each class; None: 1.
        ignore_index: the label that means that there is none.
        label_smoothing: of cross_entropy.
    """

    function: Callable[..., Tensor]
    weight: Tensor | None = None
    ignore_index: int = NO_LABEL
    label_smoothing: float | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Weighed:
        """Return the sum over the labels, and the sum of their weights."""
        weight = None if self.weight is None else self.weight.to(outputs)
        smoothing = {} if self.label_smoothing is None else {"label_smoothing": self.label_smoothing}
        total = self.function(
            outputs, targets, weight=weight, ignore_index=self.ignore_index, reduction="sum", **smoothing
        )
        # No shape may depend on the labels: 'tutti layouts' runs this on tensors without contents.
        counted = targets != self.ignore_index
        if weight is None:
            return total, counted.sum()
        return total, weight.double()[targets.where(counted, 0)].where(counted, 0).sum()


_MODULES: Final = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
    nn.NLLLoss2d: functional.nll_loss,
}
"""The losses of torch on labels: as modules, and the function that each computes."""


def _of_labels(function: object) -> _OfLabels | None:
    """Return a mean of torch over labels with its options; None for another function."""
    options: dict[str, Any] = {}
    if isinstance(function, partial):
        options = dict(function.keywords)
        function = None if function.args else function.func
    elif type(function) in _MODULES:
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        options = {name: getattr(function, name) for name in names if hasattr(function, name)}
        function = _MODULES[type(function)]
    known = function in _MODULES.values() and options.pop("reduction", "mean") == "mean"
    if not known or not options.keys() <= {"weight", "ignore_index", "label_smoothing"}:
        return None
    return _OfLabels(cast("Callable[..., Tensor]", function), **options)


def _on(dataset: DataSet, loss: Loss) -> Loss:
    """Return the loss, weighed by its own denominator where that is not the number of samples.

    Raises:
        BadData: there are samples without a label, and a built-in loss that needs one of each; or floats that
            it does not take.
    """
    parts = dataset.parts
    if dataset.train.targets.is_floating_point():
        for part in parts:
            problem = loss.floats(part.targets) if loss.floats else None
            if problem is not None:
                raise BadData(f"loss '{loss.name}' {problem}")
        return loss
    own = _of_labels(loss.function)
    ignored = NO_LABEL if own is None else own.ignore_index
    gaps = sum(int((part.targets == ignored).sum()) for part in parts)
    loss = replace(loss, ignored=ignored if gaps else None, labels=loss.labels or own is not None)
    if own is not None:
        return replace(loss, function=own, weighed=True) if gaps or own.weight is not None else loss
    if gaps and loss.name in LOSSES:
        raise BadData(
            f"{gaps:,} targets are no label ({NO_LABEL}), but loss '{loss.name}' needs one of each; leave "
            "these samples out, or use loss 'cross_entropy', which ignores them"
        )
    return loss


def _own_loss(function: object, dataset: DataSet, name: str = "") -> Loss:
    name = name or getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise BadOption(f"loss '{name}' is {function!r}, not a function of (outputs, targets)")
    if isinstance(function, type):
        raise BadOption(f"loss '{name}' is a class, not a function of (outputs, targets); give {name}()")
    return _on(dataset, Loss(name, cast("LossFunction", function), _anything))


def _refuse_other_pairs(found: tuple[object, ...], loss: Loss) -> None:
    """Refuse a pair that is not the sum of the losses with its weight."""
    total, weight = found if len(found) == 2 else (None, None)
    scalar = isinstance(total, Tensor) and total.dim() == 0
    number = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float)
    if not scalar or not number or not float(cast("float", weight)) >= 0:
        raise BadOption(
            f"loss '{loss.name}' gives {_kinds(found)}; give the mean over the samples, one value for each, "
            "or (the sum of the losses as a scalar tensor, the weight to divide it by, 0 or more)"
        )


def _kinds(found: tuple[object, ...]) -> str:
    kinds = [
        f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"a {type(one).__name__}"
        for one in found
    ]
    return f"({', '.join(kinds)})"


def _refuse_sum(outputs: Tensor, targets: Tensor, loss: Loss) -> None:
    """A sum doubles when every sample is there twice; a mean stays."""
    with torch.no_grad():
        once = loss(outputs, targets)
        twice = loss(torch.cat([outputs, outputs]), torch.cat([targets, targets]))
    if once != 0 and torch.isclose(twice, 2 * once, rtol=1e-4, atol=0.0):
        raise BadOption(
            f"loss '{loss.name}' is a sum over the samples; make it their mean (reduction='mean'), or give "
            "the sum with what to divide it by"
        )
