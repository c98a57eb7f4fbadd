"""Metrics of the probabilities that a model gives to classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from tutti.errors import BadOption
from tutti.registry import part
from tutti.training.metrics.base import GatheredMetric, Metric, made
from tutti.training.reading import CLASSES, FLAGS, Reading

BINS: Final = 15
"""Guo et al. have as many."""


@dataclass(frozen=True, kw_only=True)
class CalibrationError(Metric):
    """The expected calibration error: how far the confidence of predictions is from their accuracy.

    Predictions are sorted into bins of equal width by their confidence, the largest probability. The error is
    the mean over the predictions of | accuracy - mean confidence | of their bins.

    Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks, ICML 2017, equation 3.

    Attributes:
        reading: the meaning of the outputs.
    """

    reading: Reading | None = None

    @property
    @override
    def width(self) -> int:
        return 3 * BINS

    @override
    def on(self, reading: Reading) -> Metric:
        super().on(reading)
        if reading.amounts:
            raise BadOption(
                f"metric '{self.name}' compares probabilities, but loss '{reading.loss}' has the outputs "
                "approach numbers; choose a loss such as cross_entropy or bce, or other --metrics"
            )
        return replace(self, reading=reading)

    @override
    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self.reading is not None
        probabilities, wanted = self.reading.probabilities(outputs, targets)
        if wanted.dim() > 1:
            probabilities = torch.stack([1 - probabilities, probabilities], 2).flatten(0, 1)
            wanted = wanted.flatten().long()
        confidence, found = probabilities.max(1)
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        values = torch.stack([torch.ones_like(confidence), confidence, (found == wanted).double()])
        return values.new_zeros(3, BINS).index_add_(1, bins, values).flatten()

    @override
    def value(self, sums: Tensor, labels: int) -> float:
        counts, confidence, hits = sums.view(3, BINS)
        return float((hits - confidence).abs().sum() / counts.sum())


@dataclass(frozen=True, kw_only=True)
class RankingMetric(GatheredMetric):
    """A figure of each class against all others by the order of its probabilities, the mean over the classes.

    Classes without samples, or without others, are left out.
    """

    figure: Callable[[Tensor, Tensor], float]

    @override
    def on(self, reading: Reading) -> Metric:
        super().on(reading)
        return replace(self, function=lambda outputs, targets: self._mean(reading, outputs, targets))

    @override
    def no_figure_of(self, targets: Tensor) -> str:
        flags = targets.is_floating_point()
        rows = (targets > 0).flatten(1) if flags and targets.dim() > 1 else targets.reshape(-1, 1)
        if not len(rows) or (rows != rows[0]).any():
            return ""
        what = "the same labels" if flags else f"class {int(rows[0, 0])}"
        return f"all samples have {what}, and it compares those of a class with others"

    def _mean(self, reading: Reading, outputs: Tensor, targets: Tensor) -> float:
        probabilities, wanted = reading.probabilities(outputs, targets)
        if not probabilities.isfinite().all():
            return float("nan")
        if wanted.dim() == 1:
            wanted = wanted[:, None] == torch.arange(probabilities.shape[1])
        found = [
            self.figure(scores, there)
            for scores, there in zip(probabilities.T, wanted.bool().T, strict=True)
            if there.any() and not there.all()
        ]
        return sum(found) / len(found) if found else float("nan")


def _steps(scores: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many with and without the class have at least each of the different scores, from the top."""
    order = scores.argsort(descending=True)
    sorted_scores, hits = scores[order], there[order].double().cumsum(0)
    last = torch.ones(len(scores), dtype=torch.bool)
    last[:-1] = sorted_scores[1:] != sorted_scores[:-1]
    counts = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    return hits[last], (counts - hits)[last]


def _area(scores: Tensor, there: Tensor) -> float:
    hits, others = (torch.cat([one.new_zeros(1), one]) for one in _steps(scores, there))
    return float(torch.trapezoid(hits, others) / (hits[-1] * others[-1]))


def _precision(scores: Tensor, there: Tensor) -> float:
    hits, others = _steps(scores, there)
    gained = torch.diff(hits, prepend=hits.new_zeros(1))
    return float((gained * hits / (hits + others)).sum() / hits[-1])


def _ranking(name: str, figure: Callable[[Tensor, Tensor], float]) -> Metric:
    def unread(outputs: Tensor, targets: Tensor) -> float:
        raise NotImplementedError("made for a kind of targets by `on`")

    return RankingMetric(name=name, better="higher", takes=(CLASSES, FLAGS), figure=figure, function=unread)


@part("auc")
@made
def auc() -> Metric:
    """Area under the ROC curve of each class against all others, the mean over the classes."""
    return _ranking("auc", _area)


@part("average_precision")
@made
def average_precision() -> Metric:
    """Average precision of each class against all others, the mean over the classes."""
    return _ranking("average_precision", _precision)


@part("calibration_error")
@made
def calibration_error() -> Metric:
    """Expected calibration error: the distance of confidence and accuracy in 15 bins of confidence."""
    return CalibrationError(name="calibration_error", better="lower", takes=(CLASSES, FLAGS))
