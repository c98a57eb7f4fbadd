"""Metrics of predicted classes that are made of counts: of hits, predictions and labels of each class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from tutti.registry import part
from tutti.training.metrics.base import Metric, made
from tutti.training.reading import CLASSES, FLAGS, Reading

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hits, predictions, labels), float64, one number for each class -> scores of these; NaN where undefined."""


@dataclass(frozen=True, kw_only=True)
class ClassMetric(Metric):
    """A score of each class, and the mean over those classes that are there or are predicted.

    Of several labels of 0 or 1, the mean over the labels.

    Attributes:
        score: of a class.
        micro: score the counts of all classes together instead.
        undefined: what counts for a score that is undefined; None: such a class is left out.
        reading: the meaning of the outputs.
    """

    score: Score
    micro: bool = False
    undefined: float | None = 0.0
    reading: Reading | None = None

    @property
    @override
    def width(self) -> int:
        assert self.reading is not None
        return 3 * self.reading.columns

    @override
    def on(self, reading: Reading) -> Metric:
        super().on(reading)
        return replace(self, reading=reading)

    @override
    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self.reading is not None
        found, wanted = self.reading.decisions(outputs, targets)
        if found.dim() > 1:
            return torch.cat([(found & wanted).sum(0), found.sum(0), wanted.sum(0)]).double()
        count = self.reading.columns
        # Predictions of no known class are one more, which is left out.
        kinds = [wanted[found == wanted], found.clamp(max=count), wanted]
        return torch.cat([torch.bincount(one, minlength=count)[:count] for one in kinds]).double()

    @override
    def value(self, sums: Tensor, labels: int) -> float:
        counts = sums.view(3, -1)
        counts = counts[:, counts[1:].sum(0) > 0]
        if self.micro:
            counts = counts.sum(1, keepdim=True)
        scores = self.score(*counts)
        if self.undefined is not None:
            scores = scores.nan_to_num(nan=self.undefined)
        return float(scores.nanmean())


def _f1(hits: Tensor, predictions: Tensor, labels: Tensor) -> Tensor:
    return 2 * hits / (predictions + labels)


def _precision(hits: Tensor, predictions: Tensor, labels: Tensor) -> Tensor:
    return hits / predictions


def _recall(hits: Tensor, predictions: Tensor, labels: Tensor) -> Tensor:
    return hits / labels


def _metric(name: str, score: Score, micro: bool = False, undefined: float | None = 0.0) -> Metric:
    return ClassMetric(
        name=name, better="higher", takes=(CLASSES, FLAGS), score=score, micro=micro, undefined=undefined
    )


@part("f1")
@made
def f1() -> Metric:
    """F1 score, the mean over the classes (macro)."""
    return _metric("f1", _f1)


@part("f1_micro")
@made
def f1_micro() -> Metric:
    """F1 score of the counts of all classes together."""
    return _metric("f1_micro", _f1, micro=True)


@part("precision")
@made
def precision() -> Metric:
    """Share of right ones among the predictions of a class, the mean over the classes (macro)."""
    return _metric("precision", _precision)


@part("precision_micro")
@made
def precision_micro() -> Metric:
    """Share of right ones among all predictions."""
    return _metric("precision_micro", _precision, micro=True)


@part("recall")
@made
def recall() -> Metric:
    """Share of found ones among the labels of a class, the mean over the classes (macro)."""
    return _metric("recall", _recall)


@part("recall_micro")
@made
def recall_micro() -> Metric:
    """Share of found ones among all labels."""
    return _metric("recall_micro", _recall, micro=True)


@part("balanced_accuracy")
@made
def balanced_accuracy() -> Metric:
    """Accuracy of each class, the mean over the classes that are there."""
    return _metric("balanced_accuracy", _recall, undefined=None)
