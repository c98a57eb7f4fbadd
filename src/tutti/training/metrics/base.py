"""Metrics, exact over batches and ranks.

kind        of each sample             over all samples
summed      numbers                    computed from their sums: a mean, or a score of the hits of each class
gathered    its outputs and targets    computed from all of them, brought together on rank 0
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.errors import BadModel, BadOption
from tutti.records.texts import better_by_name
from tutti.training.targets import AMOUNTS, CLASSES, FLAGS, Reading

MetricFunction = Callable[[Tensor, Tensor], object]
"""(outputs, targets) -> values of each sample, or a number for all of them."""

TARGETS: Final = ("targets", "y_true", "y1")
"""Names of a first parameter for which a function gets targets before outputs, as in scikit-learn."""

DECISIONS: Final = ("y_pred", "y2")
"""Names of a second parameter for predicted classes, or amounts."""

PROBABILITIES: Final = ("y_score", "y_prob", "y_proba")
"""Names of a second parameter for probabilities."""


def mean(sums: Tensor, labels: int) -> float:
    """Return the mean of one number for each label."""
    return float(sums[0]) / labels


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric with its name.

    Attributes:
        name: its name in records and messages.
        function: (outputs, targets) -> one value for each sample, of shape (n, ...); rows to add up, of shape
            (rows, width); or one number for all samples, if it gathers.
        takes: the kinds of targets that it is for; empty: any.
        width: the count of numbers summed over the samples; 0: it gathers.
        figure: (sums of shape (width,) in float64, the number of labels) -> the metric.
        read: makes the metric for a kind of targets; None: it is the same for all.
    """

    name: str
    function: MetricFunction
    takes: tuple[str, ...] = ()
    width: int = 1
    figure: Callable[[Tensor, int], float] = mean
    read: Callable[[Reading], Metric] | None = None

    @property
    def gathers(self) -> bool:
        """True if it needs all outputs and targets at once: on the CPU, one row for each label."""
        return self.width == 0

    @property
    def better(self) -> str | None:
        """Whether "lower" or "higher" values are better, by its name; None: unknown."""
        return better_by_name(self.name)

    def on(self, reading: Reading) -> Metric:
        """Return the metric for these targets; BadOption if it does not take them."""
        if self.takes and reading.kind not in self.takes:
            of, remedy = "amounts", "choose other --metrics"
            if CLASSES in self.takes:
                of = "classes"
                remedy = f"give class numbers as whole numbers or with --data.classes N, or {remedy}"
            raise BadOption(
                f"metric '{self.name}' compares {of}, but the targets are {reading.kind}; {remedy}"
            )
        return self if self.read is None else self.read(reading)

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over the samples, of shape (width,), or a scalar, in float64."""
        if self.gathers:
            return outputs.new_empty(0).double()
        values = self.function(outputs, targets)
        if self.width > 1 and isinstance(values, Tensor):
            return values.double().sum(0)
        if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(targets):
            raise BadModel(
                f"metric '{self.name}' must give a tensor with one value for each of {len(targets)} samples, "
                f"or one number for all of them; it gives {values}"
            )
        return values.flatten(1).double().mean(1).sum() if values.dim() > 1 else values.double().sum()

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of all samples; NaN where an output is."""
        if outputs.isnan().any():
            return math.nan
        try:
            found: Any = self.function(outputs, targets)
            return float(found)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadOption(
                f"metric '{self.name}' cannot be computed of {len(targets):,} outputs and targets: "
                f"{type(error).__name__}: {error}; choose another, or give a function of your own with the "
                "arguments that it needs: file.py:function(targets, outputs)"
            ) from error


def own_metric(function: object, name: str, reading: Reading) -> Metric:
    """Make a metric of a function of the user's, or of scikit-learn; BadOption if it is no function.

    A function whose first parameter is one of `TARGETS` gets targets and outputs of all samples at once, as
    arrays of NumPy. Any other gets outputs and targets, as tensors.
    """
    if not callable(function) or isinstance(function, type):
        raise BadOption(f"metric '{name}' is {function!r}, not a function of (outputs, targets)")
    try:
        first, second, *_ = inspect.signature(function).parameters
    except ValueError:  # unknown, or fewer
        first, second = "", ""
    if first not in TARGETS:
        return Metric(name=name, function=function)

    def all_at_once(outputs: Tensor, targets: Tensor) -> object:
        return function(*_arrays(second, reading, outputs, targets))

    return Metric(name=name, function=all_at_once, width=0)


def _arrays(
    wanted: str, reading: Reading, outputs: Tensor, targets: Tensor
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return targets and outputs for a second parameter of the name `wanted`."""
    of_labels = reading.kind in (CLASSES, FLAGS)
    if wanted in DECISIONS and of_labels:
        found, true = reading.decisions(outputs, targets)
        return np.asarray(true.long()), np.asarray(found.long())
    if wanted in DECISIONS and reading.kind == AMOUNTS:
        return np.asarray(targets), np.asarray(outputs.reshape(targets.shape))
    if wanted in PROBABILITIES and of_labels:
        probabilities, true = reading.probabilities(outputs, targets)
        two = true.dim() == 1 and probabilities.shape[1] == 2
        return np.asarray(true.long()), np.asarray(probabilities[:, 1] if two else probabilities)
    return np.asarray(targets), np.asarray(outputs)


def made(make: Callable[[], Metric]) -> Metric:
    """Make a metric of the registry: the decorator below `@part`."""
    return make()
