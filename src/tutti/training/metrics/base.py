"""The kinds of metrics, exact over batches and ranks.

    kind        of each sample             over all samples
    mean        a value                    their mean
    counted     some numbers               made of the sums of these, such as hits of each class
    gathered    its outputs and targets    computed of all of them at once, brought together on one rank

No metric is a mean of what batches or ranks have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from typing_extensions import override

from tutti.errors import BadModel, BadOption
from tutti.records.texts import better_by_name
from tutti.training.reading import AMOUNTS, CLASSES, FLAGS, SHARES, Reading

MetricFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one value for each sample."""

_KINDS: Final = {
    CLASSES: "class numbers",
    FLAGS: "labels of 0 or 1",
    SHARES: "shares of classes",
    AMOUNTS: "floats other than 0 and 1",
}
"""The kinds of targets in words."""


@dataclass(frozen=True, kw_only=True)
class Metric(ABC):
    """A metric with its name.

    Attributes:
        name: its name in records and messages.
        better: whether "lower" or "higher" values are; None: nobody has said, as of a function of the user's.
        takes: the kinds of targets that it is for; empty: any.
        gathers: whether all outputs and targets are needed at once.
    """

    name: str
    better: str | None
    takes: tuple[str, ...] = ()
    gathers: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Count of the numbers that are summed over the samples."""
        return 1

    def on(self, reading: Reading) -> Metric:
        """Return the metric for such targets.

        Raises:
            BadOption: it is not for them.
        """
        if self.takes and reading.kind not in self.takes:
            other = "choose other --metrics"
            of, remedy = "amounts", other
            if CLASSES in self.takes:
                of = "classes"
                remedy = f"give class numbers as whole numbers or with --data.classes N, or {other}"
            raise BadOption(
                f"metric '{self.name}' compares {of}, but the targets are {_KINDS[reading.kind]}; {remedy}"
            )
        return self

    def no_figure_of(self, targets: Tensor) -> str:
        """Say why there is no figure of samples with these targets, which all have a label; else nothing."""
        return ""

    @abstractmethod
    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over the samples, of shape (width,), or a scalar, in float64.

        Args:
            outputs: of the model, of shape (n, ...).
            targets: of the same samples, of shape (n, ...).

        Raises:
            BadModel: the metric does not take these outputs.
        """

    @abstractmethod
    def value(self, sums: Tensor, labels: int) -> float:
        """Return the metric.

        Args:
            sums: of all samples, of shape (width,), in float64.
            labels: how many have a label; at least 1.
        """


@dataclass(frozen=True, kw_only=True)
class MeanMetric(Metric):
    """The mean of one value for each sample.

    Attributes:
        function: computes the values.
    """

    function: MetricFunction

    @override
    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values = self.function(outputs, targets)
        if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(targets):
            given = (
                f"shape {tuple(values.shape)} for {len(targets)} samples"
                if isinstance(values, Tensor)
                else f"a {type(values).__name__}"
            )
            raise BadModel(
                f"metric '{self.name}' gives {given}; it must give a tensor with one value for each sample, "
                "or one number for all of them"
            )
        return values.flatten(1).double().mean(1).sum() if values.dim() > 1 else values.double().sum()

    @override
    def value(self, sums: Tensor, labels: int) -> float:
        return float(sums[0]) / labels


@dataclass(frozen=True, kw_only=True)
class GatheredMetric(Metric):
    """A figure of all outputs and targets together.

    Attributes:
        function: (outputs, targets) -> a number: tensors on the CPU, one row for each label.
    """

    function: Callable[[Tensor, Tensor], object]
    gathers = True

    @property
    @override
    def width(self) -> int:
        return 0

    @override
    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    @override
    def value(self, sums: Tensor, labels: int) -> float:
        raise NotImplementedError("nothing of this metric is summed")

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric; NaN where an output is.

        Raises:
            BadOption: the function fails, or gives something other than a number.
        """
        if outputs.isnan().any():
            return math.nan
        try:
            found: Any = self.function(outputs, targets)
            if isinstance(found, Tensor) and found.numel() == 1:
                found = found.item()
            return float(found)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadOption(
                f"metric '{self.name}' cannot be computed of {len(targets):,} outputs and targets: "
                f"{type(error).__name__}: {error}; choose another, or give a function of your own with the "
                "arguments that it needs: file.py:function(targets, outputs)"
            ) from error


def built_in(function: MetricFunction) -> MeanMetric:
    """Make a metric of the registry of a function that is named as it: the decorator below `@part`."""
    name = function.__name__
    return MeanMetric(name=name, better=better_by_name(name), function=function)


def made(make: Callable[[], Metric]) -> Metric:
    """Make a metric of the registry where its kind is another: the decorator below `@part`."""
    return make()
