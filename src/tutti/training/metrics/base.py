"""The two kinds of metrics, exact over batches and ranks.

    kind        of each sample             over all samples
    summed      some numbers               made of their sums: a mean, or a score of the hits of each class
    gathered    its outputs and targets    computed of all of them at once, brought together on one rank

No metric is a mean of what batches or ranks have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from tutti.errors import BadModel, BadOption
from tutti.records.texts import better_by_name
from tutti.training.reading import AMOUNTS, CLASSES, FLAGS, SHARES, Reading

MetricFunction = Callable[[Tensor, Tensor], object]
"""(outputs, targets) -> values of each sample, or a number for all of them."""

_KINDS: Final = {
    CLASSES: "class numbers",
    FLAGS: "labels of 0 or 1",
    SHARES: "shares of classes",
    AMOUNTS: "floats other than 0 and 1",
}
"""The kinds of targets in words."""


def mean(sums: Tensor, labels: int) -> float:
    """Return the mean of one number for each label."""
    return float(sums[0]) / labels


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric with its name.

    Attributes:
        name: its name in records and messages.
        function: (outputs, targets) -> one value for each sample, of shape (n, ...); rows of several
            numbers, of shape (rows, width), which are added up; or one number for all samples, if it gathers.
        takes: the kinds of targets that it is for; empty: any.
        width: how many numbers are summed over the samples.
        figure: (their sums of shape (width,) in float64, the number of labels) -> the metric.
        gathers: whether all outputs and targets are needed at once.
        read: makes the metric for a kind of targets; None: it is the same for all.
    """

    name: str
    function: MetricFunction
    takes: tuple[str, ...] = ()
    width: int = 1
    figure: Callable[[Tensor, int], float] = mean
    gathers: bool = False
    read: Callable[[Reading], Metric] | None = None

    @property
    def better(self) -> str | None:
        """Whether "lower" or "higher" values are better; None: its name does not say so."""
        return better_by_name(self.name)

    def on(self, reading: Reading) -> Metric:
        """Return the metric for such targets.

        Raises:
            BadOption: it is not for them.
        """
        if self.takes and reading.kind not in self.takes:
            of, remedy = "amounts", "choose other --metrics"
            if CLASSES in self.takes:
                of = "classes"
                remedy = f"give class numbers as whole numbers or with --data.classes N, or {remedy}"
            raise BadOption(
                f"metric '{self.name}' compares {of}, but the targets are {_KINDS[reading.kind]}; {remedy}"
            )
        return self if self.read is None else self.read(reading)

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over the samples, of shape (width,), or a scalar, in float64.

        Args:
            outputs: of the model, of shape (n, ...).
            targets: of the same samples, of shape (n, ...).

        Raises:
            BadModel: the metric does not take these outputs.
        """
        if self.gathers:
            return outputs.new_empty(0).double()
        values = self.function(outputs, targets)
        if self.width > 1 and isinstance(values, Tensor):
            return values.double().sum(0)
        if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(targets):
            given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise BadModel(
                f"metric '{self.name}' gives {given} for {len(targets)} samples; it must give a tensor with "
                "one value for each sample, or one number for all of them"
            )
        return values.flatten(1).double().mean(1).sum() if values.dim() > 1 else values.double().sum()

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of all samples; NaN where an output is.

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


def gathered(name: str, function: MetricFunction, takes: tuple[str, ...] = ()) -> Metric:
    """Return a metric of all outputs and targets together: tensors on the CPU, one row for each label."""
    return Metric(name=name, function=function, takes=takes, width=0, gathers=True)


def built_in(function: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    """Make a mean of the registry of a function that is named as it: the decorator below `@part`."""
    return Metric(name=function.__name__, function=function)


def made(make: Callable[[], Metric]) -> Metric:
    """Make another metric of the registry: the decorator below `@part`."""
    return make()
