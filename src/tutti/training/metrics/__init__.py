"""Metrics by name. A metric has one value for each sample, so that sums over batches and ranks are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tutti.data.parts import DataSet
from tutti.errors import BadModel, BadOption
from tutti.registry import Registry
from tutti.training.losses import Loss
from tutti.training.stopping import LOSS
from tutti.training.target_kinds import are_flags

MetricFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one value for each sample, or their mean as a scalar."""


METRICS: Registry[Metric] = Registry(
    "tutti.training.metrics", "metric", "Or give package.module:function or file.py:function."
)
"""The built-in metrics."""


@dataclass(frozen=True)
class Metric:
    """A metric with its name.

    Attributes:
        name: its name in records and messages.
        function: computes it.
        better: whether "lower" or "higher" values are; None: nobody has said, as of a function of the user's.
    """

    name: str
    function: MetricFunction
    better: str | None = None

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over the samples, a scalar in float64.

        Args:
            outputs: of the model, of shape (n, ...).
            targets: of the same samples, of shape (n, ...).

        Raises:
            BadModel: the metric gives something other than one value for each sample, or a scalar.
        """
        values = self.function(outputs, targets)
        if not isinstance(values, Tensor):
            raise BadModel(
                f"metric '{self.name}' gives a {type(values).__name__}; it must give a tensor: one value for "
                "each sample, or their mean"
            )
        if values.dim() == 0:
            return values.double() * len(targets)
        if len(values) != len(targets):
            raise BadModel(
                f"metric '{self.name}' gives shape {tuple(values.shape)} for {len(targets)} samples; "
                f"it must give one value for each sample, or their mean"
            )
        return values.flatten(1).double().mean(1).sum() if values.dim() > 1 else values.double().sum()


def built_in(better: str) -> Callable[[MetricFunction], Metric]:
    """Make a metric of the registry, named as its function: the decorator below `@part`.

    Args:
        better: "lower" or "higher" values.
    """
    return lambda function: Metric(function.__name__, function, better)


def named_metrics(
    spec: str | MetricFunction | Sequence[str | MetricFunction], loss: Loss, dataset: DataSet
) -> tuple[Metric, ...]:
    """Return the metrics that `spec` means.

    Args:
        spec: comma-separated names, or a sequence of names and callables: a name in `METRICS`,
            package.module:function or file.py:function. "auto" is accuracy for classes and labels of 0 or
            1, mae for amounts, nothing for shares, probabilities and float targets with the user's own loss.
            "none" is nothing.
        loss: of the run.
        dataset: the targets of its training part decide "auto".

    Raises:
        UnknownName: no metric has this name.
        BadOption: a name does not lead to a callable, two metrics have the same name, or the targets are
            none that a metric takes.
    """
    parts: Sequence[str | MetricFunction]
    given = [spec] if callable(spec) else spec
    parts = _words(given) if isinstance(given, str) else list(given)
    if parts == ["auto"]:
        parts = _automatic(loss, dataset)
    if parts == ["none"]:
        parts = []
    metrics = tuple(_metric(part) for part in parts)
    if METRICS["accuracy"] in metrics:
        _refuse_accuracy(loss, dataset.train.targets)
        if loss.amounts:
            metrics = tuple(NEAREST if metric == METRICS["accuracy"] else metric for metric in metrics)
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadOption(f"metric '{twice}' is given twice; give each once, and callables different names")
    return metrics


def check_metrics(spec: str) -> None:
    """Refuse names that lead to no metric, before there is any data.

    Raises:
        UnknownName: no metric has this name.
        BadOption: a name does not lead to a callable.
    """
    for name in _words(spec):
        if name not in ("auto", "none"):
            _metric(name)


def better_of(metrics: Sequence[Metric]) -> dict[str, str | None]:
    """Return of the loss and of each metric whether lower or higher values are better, as far as is known."""
    return {metric.name: metric.better for metric in metrics} | {LOSS: "lower"}


def better_of_names(spec: str) -> dict[str, str | None] | None:
    """Return the same of the metrics that a configuration names, before there is any data.

    Returns:
        Of "auto" all that it may mean, and more; None where an object of the user's is among them, whose name
        is not known yet.
    """
    names = list(METRICS) if spec.strip() == "auto" else [name for name in _words(spec) if name != "none"]
    if not all(name in METRICS for name in names):
        return None
    return better_of([METRICS[name] for name in names])


def predicted(outputs: Tensor, targets: Tensor, amounts: bool = False) -> Tensor:
    """Return the class that each output means: the largest score; of a single logit, whether it is above 0.

    Args:
        outputs: of shape (n, ...), or (n, classes, ...).
        targets: of shape (n, ...).
        amounts: a single output is no logit, but the class number itself: the nearest one is meant.
    """
    if outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return outputs.argmax(1)
    if amounts:
        return outputs.round().clamp(min=0).reshape(targets.shape).to(torch.int64)
    return (outputs > 0).reshape(targets.shape).to(torch.int64)


def labelled(outputs: Tensor, targets: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Outputs and targets of what has a label, one row for each; everything where `ignored` is None.

    Args:
        outputs: of shape (n, classes, *rest).
        targets: of shape (n, *rest), integers.
        ignored: the label that means that there is none.
    """
    if ignored is None:
        return outputs, targets
    rows = outputs.movedim(1, -1).flatten(0, -2) if outputs.dim() > targets.dim() else outputs.flatten()
    kept = targets.flatten() != ignored
    return rows[kept], targets.flatten()[kept]


def _accuracy_of_nearest(outputs: Tensor, targets: Tensor) -> Tensor:
    return predicted(outputs, targets, amounts=True) == targets


NEAREST = Metric("accuracy", _accuracy_of_nearest, "higher")
"""The accuracy where a loss has a single output approach the class number."""


def _words(spec: str) -> list[str]:
    return [name.strip() for name in spec.split(",") if name.strip()]


def _automatic(loss: Loss, dataset: DataSet) -> list[str]:
    targets = dataset.train.targets
    if not targets.is_floating_point() or (loss.name == "bce" and are_flags(targets)):
        return ["accuracy"]
    return ["mae"] if loss.name in ("mse", "l1") else []


def _refuse_accuracy(loss: Loss, targets: Tensor) -> None:
    if targets.is_floating_point() and (loss.labels or not are_flags(targets)):
        kind = "shares of classes" if loss.labels else "floats other than 0 and 1"
        raise BadOption(
            f"metric 'accuracy' compares classes, but the targets are {kind}; give class numbers as whole "
            "numbers or with --data.classes N, or choose other --metrics"
        )


def _metric(spec: object) -> Metric:
    found = METRICS.load(spec) if isinstance(spec, str) else spec
    if isinstance(found, Metric):
        return found
    name = (
        spec.rpartition(":")[2] if isinstance(spec, str) else getattr(spec, "__name__", type(spec).__name__)
    )
    if not callable(found):
        raise BadOption(f"metric '{name}' is a {type(found).__name__}, not a function of (outputs, targets)")
    return Metric(name, cast("MetricFunction", found))
