"""Losses by name.

A loss is a mean, which is put together from the parts of a batch that ranks and passes computed:

    loss = sum over the parts of total_part / sum over the parts of weight_part

For most losses the weight of a part is its number of samples, which every rank knows of all parts. Others
have a denominator of their own: cross entropy with `ignore_index` or with class weights divides by the
weights of the labels that are there, a mean over tokens by their number. They return a sum and its weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor
from torch.nn import functional

from tutti.data.columns import Inputs
from tutti.data.parts import DataSet
from tutti.data.targets import NO_LABEL
from tutti.errors import BadData, BadOption, UnknownName
from tutti.load_object import call_with_options, takes_option
from tutti.registry import Registry
from tutti.training.losses.weights import (
    LossFunction,
    OfFlags,
    OfLabels,
    Weighed,
    of_labels,
    weights_of_classes,
    weights_of_flags,
)
from tutti.training.targets import are_flags, loss_for


@dataclass(frozen=True)
class LossBatch:
    """The samples of which a loss is computed, for one that asks for more than the output and the targets.

    Attributes:
        inputs: as the model got them: of shape (samples, ...), or several by name or by position.
        targets: of shape (samples, ...).
    """

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


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
        ignored: the label that means that there is none; such samples count in no metric. None: every label
            counts.
        weighed: whether the loss has a denominator of its own, so that `function` gives a sum and its weight.
        amounts: whether a single output approaches the class number itself, and is no logit.
        floats: says why the loss does not take float targets, or None if it does; None: it takes all.
        each: (outputs, targets) -> the loss of each label of 0 or 1, of the targets' shape; None: it takes no
            such labels.
        make: makes it with options by name; None: it takes none.
    """

    name: str
    function: LossFunction
    ignored: int | None = None
    weighed: bool = False
    amounts: bool = False
    floats: Callable[[Tensor], str | None] | None = None
    each: Callable[[Tensor, Tensor], Tensor] | None = None
    make: Callable[..., Loss] | None = field(default=None, compare=False)

    @property
    def labels(self) -> bool:
        """True if whole-number targets are labels 0..outputs-1."""
        return of_labels(self.function) is not None

    @cached_property
    def whole(self) -> bool:
        """True if the function takes all that the model returns, and a `LossBatch`: `batch` is its second."""
        try:
            return [*inspect.signature(self.function).parameters][1:2] == ["batch"]
        except ValueError:
            return False  # of torch, in C

    def __call__(self, outputs: object, targets: Tensor | LossBatch) -> Tensor:
        """Return the sum of the losses / the samples, a scalar."""
        return self._measured(outputs, targets)[0]

    def measure(self, outputs: object, targets: Tensor | LossBatch) -> tuple[Tensor, float]:
        """Return the sum of the losses / the samples, a scalar, and the weight of these samples.

        The mean over several parts is the sum of value * samples over all of them / the sum of their weights.
        """
        value, weight = self._measured(outputs, targets)
        return value, float(weight)

    def _measured(self, outputs: object, given: Tensor | LossBatch) -> Weighed:
        found, count = self.function(outputs, given), len(given)
        if isinstance(found, tuple):
            total, weight = found
            return total / count, weight
        if found.dim() and count and len(found) % count:
            raise BadOption(
                f"loss '{self.name}' gives {len(found)} values for {count} samples; give one for each, or, "
                "where only some count, (the sum of their losses, how many they are)"
            )
        return found if found.dim() == 0 else found.mean(), count


def named_loss(
    spec: str | LossFunction,
    dataset: DataSet,
    options: Mapping[str, Any] = MappingProxyType({}),
    class_weights: str | Tensor | None = None,
) -> Loss:
    """Return the loss that `spec` means.

    Args:
        spec: a name in `LOSSES`, package.module:function, file.py:function, or a callable, such as a module
            of torch. "auto" is cross_entropy for classes, mse for float targets
            that look like nothing else. mse, l1 and bce take classes one-hot.
        dataset: the targets of its training part decide "auto"; whether any part has samples without a label
            decides what cross entropy divides by.
        options: arguments by name: of a built-in loss, of a class, or of a function besides its first two.
        class_weights: "balanced", by the counts of the training part; the weights, separated by commas; a
            tensor with a row for each class; or None.

    Raises:
        UnknownName: no loss has this name, or it has no such option.
        BadOption: `spec` does not lead to a callable; it is "auto", and the targets may be meant as
            numbers or as labels; or the loss does not take such options or class weights.
        BadData: there are samples without a label, and the loss needs one of each; or the targets are floats
            that it does not take.
    """
    if spec == "auto":
        spec = loss_for(dataset.train.targets)
    found = LOSSES.load(spec) if isinstance(spec, str) else spec
    if isinstance(found, Loss):
        loss = with_options(found, options)
    else:
        loss = _own_loss(found, spec if isinstance(spec, str) else "", options)
    return _on(dataset, loss if class_weights is None else _weighted(loss, class_weights, dataset))


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
    """Make a loss of the registry where its function is defined: the decorator below `@part`.

    The parameters of that function are the options of the loss.
    """
    return replace(make(), make=make)


def align(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return `targets` with the shape and dtype of `outputs`: labels one-hot, (n,) as (n, 1) and back."""
    if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return functional.one_hot(targets, outputs.shape[1]).movedim(-1, 1).to(outputs.dtype)
    return targets.reshape(outputs.shape).to(outputs.dtype)


def _on(dataset: DataSet, loss: Loss) -> Loss:
    """Return the loss, weighed by its own denominator where that is not the number of samples."""
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
        return replace(loss, function=own, weighed=True) if gaps or own.weight is not None else loss
    if gaps and loss.name in LOSSES:
        raise BadData(
            f"{gaps:,} targets are no label ({NO_LABEL}), but loss '{loss.name}' needs one of each; leave "
            "these samples out, or use loss 'cross_entropy', which ignores them"
        )
    return loss


def with_options(loss: Loss, options: Mapping[str, Any]) -> Loss:
    """Return a built-in loss with options.

    Raises:
        UnknownName: it has no such option.
        BadOption: a value that it refuses.
    """
    if not options:
        return loss
    assert loss.make is not None, "a built-in loss"
    return replace(cast("Loss", call_with_options(loss.make, options, "loss", loss.name)), make=loss.make)


def _own_loss(function: object, name: str, options: Mapping[str, Any]) -> Loss:
    """Return a loss of the user's: a function with options of its own, or a class that is made with them."""
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
    """Return the weights of classes, or of labels of 0 and of 1, in a loss; None: it has none."""
    function = loss.function
    if isinstance(function, OfFlags):
        return function.weights
    return function.weight if isinstance(function, OfLabels) else None


def _weighted(loss: Loss, given: str | Tensor, dataset: DataSet) -> Loss:
    """Return a loss in which the samples of each class, or labels of 0 and 1, have a weight.

    Its denominator is the sum of the weights, so the answer is the same however a batch is cut.
    """
    targets = dataset.train.targets
    own = None if targets.is_floating_point() else of_labels(loss.function)
    if own is not None and own.weight is not None:
        raise BadOption(f"loss '{loss.name}' has weights of its own; leave them or --class-weights out")
    if own is not None:
        classes = dataset.classes or int(targets.max()) + 1
        counted = targets[targets != own.ignore_index]
        weights = given if isinstance(given, Tensor) else weights_of_classes(given, counted, classes)
        return replace(loss, function=replace(own, weight=weights.flatten()), weighed=True)
    if loss.each is not None and targets.is_floating_point() and are_flags(targets):
        own_shape = targets.shape[1:] if isinstance(given, Tensor) and given.shape[1] > 1 else ()
        weights = weights_of_flags(given, targets) if isinstance(given, str) else given.view(2, *own_shape)
        return replace(loss, function=OfFlags(loss.each, weights), weighed=True)
    raise BadOption(
        "--class-weights are for cross_entropy and nll on class numbers, and for bce on "
        f"labels of 0 or 1; loss '{loss.name}' has neither here: choose another, or leave --class-weights out"
    )
