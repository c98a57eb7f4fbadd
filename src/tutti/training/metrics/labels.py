"""Metrics of predicted classes that are means over the samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor
from typing_extensions import override

from tutti.errors import BadModel
from tutti.registry import part
from tutti.training.metrics.base import MeanMetric, Metric, MetricFunction, made
from tutti.training.reading import CLASSES, FLAGS, Reading, predicted


@dataclass(frozen=True, kw_only=True)
class _Accuracy(MeanMetric):
    @override
    def on(self, reading: Reading) -> Metric:
        return NEAREST if super().on(reading) and reading.amounts else self


def _accuracy(function: MetricFunction) -> MeanMetric:
    return _Accuracy(name="accuracy", better="higher", takes=(CLASSES, FLAGS), function=function)


@part("accuracy")
@made
def accuracy() -> Metric:
    """Share of the labels that are predicted."""
    return _accuracy(lambda outputs, targets: predicted(outputs, targets) == targets)


NEAREST: Final = _accuracy(lambda outputs, targets: predicted(outputs, targets, amounts=True) == targets)
"""The accuracy where a loss has a single output approach the class number."""


def top(count: int) -> MeanMetric:
    """Make the metric: the share of the labels that are among the `count` largest scores."""
    name = f"top{count}"
    function = partial(_among_largest, name, count)
    return MeanMetric(name=name, better="higher", takes=(CLASSES,), function=function)


def _among_largest(name: str, count: int, outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() != targets.dim() + 1 or outputs.shape[1] == 1:
        raise BadModel(
            f"metric '{name}' needs one score for each class, not outputs of shape {tuple(outputs.shape)}"
        )
    best = outputs.topk(min(count, outputs.shape[1]), dim=1).indices
    return (best == targets.unsqueeze(1)).any(1)


@part("top5")
@made
def top5() -> Metric:
    """Share of the labels that are among the five largest scores; topK of any other number."""
    return top(5)
