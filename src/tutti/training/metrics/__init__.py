"""Metrics by name, exact over batches and ranks.

kind        of each sample             over all samples
summed      numbers                    computed from their sums: a mean, or a score of the hits of each class
gathered    its outputs and targets    computed from all of them, brought together on rank 0
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti import parts
from tutti.data.parts import DataSet
from tutti.errors import BadModel, BadOption
from tutti.load_object import takes_option
from tutti.records.texts import TOP, better_by_name
from tutti.registry import Registry
from tutti.training.losses import Loss
from tutti.training.stopping import LOSS
from tutti.training.targets import AMOUNTS, CLASSES, FLAGS, Reading, spread

MetricFunction = Callable[..., object]
"""(outputs, targets) -> values of each sample, or a number for all of them."""

TARGETS: Final = ("targets", "y_true", "y1")
"""Names of a first parameter for which a function gets targets before outputs, as in scikit-learn."""

DECISIONS: Final = ("y_pred", "y2")
"""Names of a second parameter for predicted classes, or amounts."""

PROBABILITIES: Final = ("y_score", "y_prob", "y_proba")
"""Names of a second parameter for probabilities."""


def mean(sums: Tensor, labels: float) -> float:
    """Return the mean of one number for each label."""
    return float(sums[0]) / labels


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric with its name.

    Its function maps (outputs, targets) to one value for each sample, of shape (n, ...); to rows to add up,
    of shape (rows, width); or to one number for all samples, if it gathers.
    """

    name: str
    function: MetricFunction
    takes: tuple[str, ...] = ()  # the kinds of targets that it is for; empty: any
    width: int = 1  # the count of numbers summed over the samples; 0: it gathers
    figure: Callable[[Tensor, float], float] = mean  # (sums in float64, labels or their weight) -> the metric
    read: Callable[[Reading], Metric] | None = None  # makes the metric for a kind of targets
    weighs: bool = False  # the function takes the weights of the samples as its third argument

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
            of, remedy = "regression", "choose other --metrics"
            if CLASSES in self.takes:
                of = "classes"
                remedy = f"give class numbers as whole numbers or with --data.classes N, or {remedy}"
            raise BadOption(f"metric '{self.name}' is for {of}, but the targets are {reading.kind}; {remedy}")
        return self if self.read is None else self.read(reading)

    def sum(self, outputs: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
        """Return the weighted sums over the samples, of shape (width,) or a scalar, in float64."""
        if self.gathers:
            return outputs.new_empty(0).double()
        values: Any = self.function(outputs, targets, *(weights if self.weighs else ()))
        if self.width == 1:
            if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(targets):
                raise BadModel(
                    f"metric '{self.name}' must give a tensor with one value for each of {len(targets)} "
                    f"samples, or one number for all of them; it gives {values}"
                )
            values = values.flatten(1).double().mean(1) if values.dim() > 1 else values
        values = values.double()
        found: Tensor = weights[0].to(values) @ values if weights and not self.weighs else values.sum(0)
        return found

    def of_all(self, outputs: Tensor, targets: Tensor, *weights: Tensor) -> float:
        """Return the metric of all samples; NaN if an output is."""
        if outputs.isnan().any():
            return math.nan
        try:
            found: Any = self.function(outputs, targets, *weights)
            return float(found)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadOption(
                f"metric '{self.name}' cannot be computed of {len(targets):,} outputs and targets: "
                f"{type(error).__name__}: {error}; choose another, or give a function of your own with the "
                "arguments that it needs: file.py:function(targets, outputs)"
            ) from error


def own_metric(function: object, name: str, reading: Reading) -> Metric:
    """Make a metric from a function of the user's, or of scikit-learn.

    A function whose first parameter is one of `TARGETS` gets targets and outputs of all samples at once, as
    NumPy arrays. Any other gets outputs and targets, as tensors.
    """
    if not callable(function) or isinstance(function, type):
        raise BadOption(f"metric '{name}' is {function!r}, not a function of (outputs, targets)")
    try:
        first, second, *_ = inspect.signature(function).parameters
    except ValueError:  # unknown, or fewer
        first, second = "", ""
    if first not in TARGETS:
        return Metric(name=name, function=function)

    def all_at_once(outputs: Tensor, targets: Tensor, *weights: Tensor) -> object:
        arrays = _arrays(second, reading, outputs, targets)
        each = [one.reshape(len(arrays[0]), -1)[:, 0] for one in spread(targets, *weights)]
        return function(*arrays, **dict(zip(["sample_weight"], map(np.asarray, each), strict=False)))

    return Metric(name=name, function=all_at_once, width=0, weighs=takes_option(function, "sample_weight"))


def _arrays(
    wanted: str, reading: Reading, outputs: Tensor, targets: Tensor
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return targets and outputs for a function whose second parameter is called `wanted`."""
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
    """Make a metric for the registry: the decorator below `@part`."""
    return make()


Spec = str | Callable[..., object]
"""A metric's name, or a function that computes it."""


MOST_RANKED: Final = 10_000_000
"""The most training samples whose outputs are brought together unless a metric is named that needs it."""

METRICS: Registry[Metric] = parts.METRICS
"""The built-in metrics."""


def named_metrics(spec: Spec | Sequence[Spec], loss: Loss, dataset: DataSet) -> tuple[Metric, ...]:
    """Return the metrics for a specification.

    Args:
        spec: comma-separated names, or a sequence of names and callables: a name in `METRICS`,
            package.module:function or file.py:function. "auto" is accuracy for classes and labels of 0 or
            1, with balanced_accuracy and auc for two classes; mae, rmse and r2 for regression; nothing for
            other float targets. "none" is nothing.
        loss: of the run.
        dataset: the targets of its training part decide "auto".
    """
    given = [spec] if callable(spec) else spec
    parts: Sequence[Spec] = _words(given) if isinstance(given, str) else list(given)
    reading = Reading.of(dataset, loss.name, loss.labels, loss.amounts)
    if "auto" in parts:
        others = [part for part in parts if part != "auto"]
        parts = [*(name for name in _automatic(loss, reading) if name not in others), *others]
    if parts == ["none"] or not parts:
        return ()
    metrics = tuple(_metric(part, reading).on(reading) for part in parts)
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadOption(f"metric '{twice}' is given twice; give each once, and callables different names")
    return metrics


def fitted(
    metric: Metric, outputs: Tensor, targets: Tensor, all_targets: Tensor, weighted: bool = False
) -> Metric:
    """Try a metric on the outputs for some samples, before training.

    A metric that gathers is tried on `all_targets` of the training part. A function that gives one number for
    all samples becomes a metric that gathers; BadOption if it takes no weights, and samples are `weighted`.
    """
    if metric.width == 1:
        values: object = metric.function(outputs, targets)
        if isinstance(values, int | float) or (isinstance(values, Tensor) and values.dim() == 0):
            metric = replace(metric, width=0)
    if weighted and metric.gathers and not metric.weighs:
        raise BadOption(
            f"metric '{metric.name}' gives one number for all samples, and these have weights; give it an "
            "argument sample_weight as scikit-learn's have, choose another, or leave the weights out"
        )
    if not metric.gathers:
        metric.sum(outputs, targets)
    elif len(outputs):  # else no sample of the batch has a label
        rows = torch.arange(len(all_targets)) % len(outputs)
        ones = [torch.ones(len(rows), dtype=torch.float64)] * weighted
        metric.of_all(outputs.cpu()[rows], all_targets.cpu(), *ones)
    return metric


def better_of(metrics: Sequence[Metric]) -> dict[str, str | None]:
    """Return whether "lower" or "higher" values of the loss and each metric are better; None: unknown."""
    return {metric.name: metric.better for metric in metrics} | {LOSS: "lower"}


def _words(spec: str) -> list[str]:
    return [name.strip() for name in spec.split(",") if name.strip()]


def _automatic(loss: Loss, reading: Reading) -> list[str]:
    if reading.kind == CLASSES or (loss.flags and reading.kind == FLAGS):
        samples = len(reading.targets)
        if reading.columns != 2 or reading.targets.numel() != samples:
            return ["accuracy"]
        return ["accuracy", "balanced_accuracy", *(["auc"] if samples <= MOST_RANKED else [])]
    return ["mae", "rmse", "r2"] if loss.amounts else []


def _metric(spec: object, reading: Reading) -> Metric:
    if isinstance(spec, str) and (found := TOP.fullmatch(spec)):
        from tutti.training.metrics.built_in import top

        return top(int(found[1]))
    given = METRICS.load(spec) if isinstance(spec, str) else spec
    if isinstance(given, Metric):
        return given
    if isinstance(spec, str):
        return own_metric(given, spec.rpartition(":")[2], reading)
    return own_metric(given, getattr(spec, "__name__", type(spec).__name__), reading)
