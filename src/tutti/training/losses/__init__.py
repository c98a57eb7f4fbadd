"""Losses by name.

A loss is a mean over parts of a batch, from several ranks and passes:

    loss = sum over the parts of total_part / sum over the parts of weight_part

For most losses the weight of a part is its number of samples, which every rank knows. A loss with its own
denominator, such as cross entropy with `ignore_index` or class weights, or a mean over tokens, returns a sum
and its weight. So do samples with weights w: the sums of w * loss and of w.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from tutti import parts
from tutti.data.columns import Inputs
from tutti.data.parts import DataSet
from tutti.data.targets import NO_LABEL
from tutti.errors import BadData, BadOption, UnknownName
from tutti.load_object import call_with_options, takes_option
from tutti.registry import Registry
from tutti.training.losses.units import Units, is_distance
from tutti.training.losses.weights import (
    LossFunction,
    OfLabels,
    Weighed,
    of_labels,
    weights_of_classes,
)
from tutti.training.targets import loss_for


@dataclass(frozen=True)
class LossBatch:
    """The samples, for a loss that takes more than outputs and targets."""

    inputs: Inputs  # as the model gets them: of shape (samples, ...), or several by name or by position
    targets: Tensor  # of shape (samples, ...)

    def __len__(self) -> int:
        return len(self.targets)


LOSSES: Registry[Loss] = parts.LOSSES
"""The built-in losses."""


@dataclass(frozen=True)
class Loss:
    """A loss with its name. Call it: (outputs, targets) -> scalar, the sum of the losses / the samples.

    With `units` the network's outputs, and so the loss, are in standard deviations.
    """

    name: str
    function: LossFunction
    ignored: int | None = None  # the number that means "no label"; None: every number is a label
    weighed: bool = False  # `function` gives a sum and its weight, the loss's own denominator
    amounts: bool = False  # a single output approaches the class number itself, and is no logit
    floats: Callable[[Tensor], str | None] | None = None  # returns why it does not take float targets
    flags: bool = False  # float targets are labels of 0 or 1
    one_hot: bool = False  # class numbers become one-hot for the outputs of this run
    make: Callable[..., Loss] | None = field(default=None, compare=False)  # makes it with options
    units: Units | None = field(default=None, compare=False)  # of the targets; None: nothing is scaled

    @property
    def labels(self) -> bool:
        """True if whole-number targets are labels 0..outputs-1."""
        return of_labels(self.function) is not None

    @cached_property
    def whole(self) -> bool:
        """True if the second parameter is `batch`: it gets the model's return value and a `LossBatch`."""
        try:
            return [*inspect.signature(self.function).parameters][1:2] == ["batch"]
        except ValueError:
            return False  # of torch, in C

    def __call__(self, outputs: object, targets: Tensor | LossBatch) -> Tensor:
        """Return the sum of the losses / the samples, a scalar."""
        return self._measured(outputs, self._scaled(targets))[0]

    def measure(
        self, outputs: object, targets: Tensor | LossBatch, weights: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Return the sum of the losses / the samples, a scalar, and the weight of these samples."""
        value, weight = self._measured(outputs, self._scaled(targets), weights)
        return value, float(weight)

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return a network's outputs in the unit of the targets."""
        return outputs if self.units is None else self.units.outputs(outputs)

    def reported(self, loss: Tensor, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return a loss in the unit of the targets, given the outputs in that unit, without gradient."""
        if self.units is None:
            return loss
        with torch.no_grad():
            return self._measured(outputs, targets, weights)[0]

    def called(self, outputs: object, given: Tensor | LossBatch, weights: Tensor | None = None) -> Any:
        """Call the function with amounts of the outputs' shape: (n,) and (n, 1) would broadcast to n x n."""
        if isinstance(self.function, OfLabels):
            return self.function(cast("Tensor", outputs), cast("Tensor", given), weights)
        if isinstance(given, Tensor) and isinstance(outputs, Tensor):
            alike = given.is_floating_point() and given.numel() == outputs.numel()
            return self.function(outputs, given.reshape(outputs.shape) if alike else given)
        return self.function(outputs, given)

    def _scaled(self, targets: Tensor | LossBatch) -> Tensor | LossBatch:
        if self.units is None or not isinstance(targets, Tensor):
            return targets
        return self.units.standardised(targets)

    def _measured(self, outputs: object, given: Tensor | LossBatch, weights: Tensor | None = None) -> Weighed:
        found, count = self.called(outputs, given, weights), len(given)
        if isinstance(found, tuple) and (weights is None or isinstance(self.function, OfLabels)):
            total, weight = found
            return total / count, weight
        if weights is not None and (isinstance(found, tuple) or found.dim() == 0):
            raise BadOption(
                f"loss '{self.name}' gives no value for each sample, and these have weights; let it return "
                "one for each, as torch's losses do with reduction='none', or leave the weights out"
            )
        if found.dim() and count and len(found) % count:
            raise BadOption(
                f"loss '{self.name}' gives {len(found)} values for {count} samples; give one for each, or, "
                "where only some count, (the sum of their losses, their number)"
            )
        if weights is None:
            return found if found.dim() == 0 else found.mean(), count
        each = found.reshape(count, -1).mean(1)
        return weights.to(each) @ each / count, weights.sum()


def named_loss(
    spec: str | LossFunction,
    dataset: DataSet,
    options: Mapping[str, Any] = MappingProxyType({}),
    class_weights: str | Tensor | None = None,
) -> Loss:
    """Return the loss for a specification.

    In a prepared table, mse, l1 and torch's distances of amounts are computed in standard deviations.

    Args:
        spec: a name in `LOSSES`, package.module:function, file.py:function, or a callable, such as a torch
            module. "auto" is cross_entropy for classes, and mse for regression.
        dataset: the targets; samples without a label in any part change the denominator of cross entropy.
        options: arguments by name: of a built-in loss, of a class, or of a function besides its first two.
        class_weights: "balanced", by the counts of the training part; comma-separated weights; a tensor with
            a row for each class; or None.
    """
    if spec == "auto":
        spec = loss_for(dataset.train.targets)
    found = LOSSES.load(spec) if isinstance(spec, str) else spec
    if isinstance(found, Loss):
        loss = with_options(found, options)
    else:
        loss = _own_loss(found, spec if isinstance(spec, str) else "", options)
    if loss.amounts or is_distance(loss.function):
        loss = replace(loss, units=Units.of(dataset.train.scale.preparation))
    loss = _on(dataset, loss if class_weights is None else _weighted(loss, class_weights, dataset))
    return _of_each_sample(loss) if dataset.weighted else loss


def check_labels(targets: Tensor, outputs: int, ignored: int | None = None) -> None:
    """Raise BadData if a label, other than `ignored`, lies outside 0..outputs-1."""
    if ignored is not None:
        targets = targets[targets != ignored]
        if not targets.numel():
            return
    low, high = (int(edge) for edge in targets.aminmax())
    if low < 0 or high >= outputs:
        two = ", or use the loss 'bce' for two classes" if outputs == 1 and (low, high) == (0, 1) else ""
        raise BadData(
            f"labels go from {low} to {high}, but the model has {outputs} outputs, for the labels from 0 to "
            f"{outputs - 1}; renumber the labels, or give the model more outputs{two}"
        )


def built_in(make: Callable[..., Loss]) -> Loss:
    """Make a loss from a function whose parameters are its options: the decorator below `@part`."""
    return replace(make(), make=make)


def align(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return `targets` with the shape and dtype of `outputs`: labels one-hot, (n,) as (n, 1)."""
    if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return functional.one_hot(targets, outputs.shape[1]).movedim(-1, 1).to(outputs.dtype)
    return targets.reshape(outputs.shape).to(outputs.dtype)


def _on(dataset: DataSet, loss: Loss) -> Loss:
    """Return the loss for these targets, with its own denominator where it has one."""
    parts = dataset.parts
    own = of_labels(loss.function)
    if dataset.train.targets.is_floating_point():
        for part in parts:
            problem = loss.floats(part.targets) if loss.floats else None
            if problem is not None:
                raise BadData(f"loss '{loss.name}' {problem}")
        return loss
    ignored = NO_LABEL if own is None else own.ignore_index
    gaps = sum(int((part.targets == ignored).sum()) for part in parts)
    loss = replace(loss, ignored=ignored if gaps else None)
    if own is not None:
        counts = gaps or own.weight is not None or dataset.weighted
        return replace(loss, function=own, weighed=True) if counts else loss
    if gaps and loss.name in LOSSES:
        raise BadData(
            f"{gaps:,} targets are no label ({NO_LABEL}), but loss '{loss.name}' needs one of each; leave "
            "these samples out, or use loss 'cross_entropy', which ignores them"
        )
    return loss


def _of_each_sample(loss: Loss) -> Loss:
    """Return a loss for samples with weights, with one value per sample if it can."""
    function: Any = loss.function
    if takes_option(function, "reduction"):
        function = partial(function, reduction="none")
    elif getattr(function, "reduction", "") == "mean":
        function = copy(function)
        function.reduction = "none"
    return replace(loss, function=function, weighed=True)


def with_options(loss: Loss, options: Mapping[str, Any]) -> Loss:
    """Return a built-in loss with options; UnknownName or BadOption if it does not take them."""
    if not options:
        return loss
    assert loss.make is not None, "a built-in loss"
    return replace(cast("Loss", call_with_options(loss.make, options, "loss", loss.name)), make=loss.make)


def _own_loss(function: object, name: str, options: Mapping[str, Any]) -> Loss:
    """Return the user's loss: a function or a class, with options."""
    name = name or getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type):
        function = call_with_options(function, options, "loss", name)
    elif options:
        unknown = next((one for one in options if not takes_option(function, one)), None)
        if unknown is not None:
            raise UnknownName("option", unknown, [], of=f"the loss '{name}'")
        function = partial(cast("LossFunction", function), **options)
    if not callable(function):
        raise BadOption(f"loss '{name}' is {function!r}, not a function of (outputs, targets)")
    if getattr(function, "reduction", "") == "sum":
        raise BadOption(f"loss '{name}' is a sum over the samples; make it their mean: reduction='mean'")
    return Loss(name, function)


def weights_in(loss: Loss) -> Tensor | None:
    """Return a loss's class weights, or None."""
    return loss.function.weight if isinstance(loss.function, OfLabels) else None


def _weighted(loss: Loss, given: str | Tensor, dataset: DataSet) -> Loss:
    """Return a loss with class weights; their sum is its denominator."""
    targets = dataset.train.targets
    own = None if targets.is_floating_point() else of_labels(loss.function)
    if own is None:
        raise BadOption(
            f"--class-weights are for cross_entropy and nll on class numbers, not for loss '{loss.name}' "
            "here; choose another loss, give --data.classes 2 for labels of 0 or 1, or leave them out"
        )
    if own.weight is not None:
        raise BadOption(f"loss '{loss.name}' already has class weights; leave them or --class-weights out")
    classes = dataset.classes or int(targets.max()) + 1
    counted = targets[targets != own.ignore_index]
    weights = given if isinstance(given, Tensor) else weights_of_classes(given, counted, classes)
    return replace(loss, function=replace(own, weight=weights.flatten()), weighed=True)
