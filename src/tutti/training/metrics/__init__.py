"""Metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tutti.data.parts import DataSet
from tutti.errors import BadOption
from tutti.records.texts import TOP, better_by_name
from tutti.registry import Registry
from tutti.training.losses import Loss
from tutti.training.metrics.base import Metric, own_metric
from tutti.training.stopping import LOSS
from tutti.training.targets import Reading, are_flags

Spec = str | Callable[..., object]
"""A metric's name, or a function that computes it."""


METRICS: Registry[Metric] = Registry(
    "tutti.training.metrics",
    "metric",
    "Of the K largest scores there is topK. Or give package.module:function, such as "
    "sklearn.metrics:matthews_corrcoef, or file.py:function.",
)
"""The built-in metrics."""


def named_metrics(spec: Spec | Sequence[Spec], loss: Loss, dataset: DataSet) -> tuple[Metric, ...]:
    """Return the metrics for a specification.

    Args:
        spec: comma-separated names, or a sequence of names and callables: a name in `METRICS`,
            package.module:function or file.py:function. "auto" is accuracy for classes and labels of 0 or
            1; mae, rmse and r2 for amounts; nothing for other float targets. "none" is nothing.
        loss: of the run.
        dataset: the targets of its training part decide "auto".

    Raises:
        UnknownName: no metric has this name.
        BadOption: a name is not callable, two metrics have the same name, or one does not take the targets.
    """
    given = [spec] if callable(spec) else spec
    parts: Sequence[Spec] = _words(given) if isinstance(given, str) else list(given)
    if "auto" in parts:
        others = [part for part in parts if part != "auto"]
        parts = [*(name for name in _automatic(loss, dataset) if name not in others), *others]
    if parts == ["none"] or not parts:
        return ()
    reading = Reading.of(dataset, loss.name, loss.labels, loss.amounts)
    metrics = tuple(_metric(part, reading).on(reading) for part in parts)
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadOption(f"metric '{twice}' is given twice; give each once, and callables different names")
    return metrics


def fitted(metric: Metric, outputs: Tensor, targets: Tensor, all_targets: Tensor) -> Metric:
    """Try a metric on the outputs for some samples, before training.

    A metric that gathers is tried on `all_targets` of the training part. A function that gives one number for
    all samples becomes a metric that gathers.
    """
    if metric.width == 1:
        values: object = metric.function(outputs, targets)
        if isinstance(values, int | float) or (isinstance(values, Tensor) and values.dim() == 0):
            metric = replace(metric, width=0)
    if not metric.gathers:
        metric.sum(outputs, targets)
    elif len(outputs):  # else no sample of the batch has a label
        rows = torch.arange(len(all_targets)) % len(outputs)
        metric.of_all(outputs.cpu()[rows], all_targets.cpu())
    return metric


def check_metrics(spec: str) -> None:
    """Raise UnknownName or BadOption for a name that is no metric, before there is any data."""
    for name in _words(spec):
        if name not in ("auto", "none") and not TOP.fullmatch(name):
            METRICS.load(name)


def better_of(metrics: Sequence[Metric]) -> dict[str, str | None]:
    """Return whether "lower" or "higher" values of the loss and each metric are better; None: unknown."""
    return {metric.name: metric.better for metric in metrics} | {LOSS: "lower"}


def better_of_names(spec: str) -> dict[str, str | None] | None:
    """Return the same for the metrics that a configuration names, before there is any data.

    "auto" gives all metrics. None: an object of the user's is among them, whose name is not known yet.
    """
    names = list(METRICS) if spec.strip() == "auto" else [name for name in _words(spec) if name != "none"]
    if not all(name in METRICS or TOP.fullmatch(name) for name in names):
        return None
    return {name: better_by_name(name) for name in [*names, LOSS]}


def _words(spec: str) -> list[str]:
    return [name.strip() for name in spec.split(",") if name.strip()]


def _automatic(loss: Loss, dataset: DataSet) -> list[str]:
    targets = dataset.train.targets
    if not targets.is_floating_point() or (loss.each is not None and are_flags(targets)):
        return ["accuracy"]
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
