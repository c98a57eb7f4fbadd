"""The built-in metrics: of classes and labels of 0 or 1, and of amounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from tutti.errors import BadModel
from tutti.registry import part
from tutti.training.losses import align
from tutti.training.metrics import Metric, made, mean
from tutti.training.targets import AMOUNTS, CLASSES, FLAGS, Reading, predicted, spread

LABELS: Final = (CLASSES, FLAGS)

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hits, predictions, labels), float64, one number for each class -> scores of these; NaN where undefined."""


def _of_labels(name: str, read: Callable[[Reading], Metric]) -> Metric:
    """Make a metric of labels; `read` makes it for a kind of targets."""
    return Metric(name=name, function=partial(_hits, False), takes=LABELS, read=read)


def _hits(amounts: bool, outputs: Tensor, targets: Tensor) -> Tensor:
    return predicted(outputs, targets, amounts) == targets


@part("accuracy")
@made
def accuracy() -> Metric:
    """Share of the labels that are predicted."""
    return _of_labels("accuracy", lambda reading: _accuracy_of(reading.amounts))


def _accuracy_of(amounts: bool) -> Metric:
    return Metric(name="accuracy", function=partial(_hits, amounts), takes=LABELS)


def top(count: int) -> Metric:
    """Make the metric: the share of labels among the `count` largest scores."""
    name = f"top{count}"
    return Metric(name=name, function=partial(_among_largest, name, count), takes=(CLASSES,))


def _among_largest(name: str, count: int, outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() != targets.dim() + 1 or outputs.shape[1] == 1:
        raise BadModel(
            f"metric '{name}' needs one score for each class, not outputs of shape {tuple(outputs.shape)}"
        )
    best = outputs.topk(min(count, outputs.shape[1]), dim=1).indices
    return (best == targets.unsqueeze(1)).any(1)


def _of_counts(name: str, score: Score, undefined: float = 0.0) -> Metric:
    """Make the mean of a score over the classes that are true or predicted at least once.

    `undefined` replaces a score of 0 / 0; NaN leaves the class out.
    """

    def figure(sums: Tensor, labels: float) -> float:
        counts = sums.view(3, -1)
        counts = counts[:, counts[1:].sum(0) > 0]
        return float(score(*counts).nan_to_num(nan=undefined).nanmean())

    def read(reading: Reading) -> Metric:
        function = partial(_counts, reading)
        return Metric(name=name, function=function, width=3 * reading.columns, figure=figure, weighs=True)

    return _of_labels(name, read)


def _counts(reading: Reading, outputs: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
    """Return the hits, predictions and labels of each class, or their weights, of shape (1, 3 * classes)."""
    found, wanted = reading.decisions(outputs, targets)
    if found.dim() > 1:
        marks = torch.cat([found & wanted, found, wanted], 1).double()
        return weights[0].to(marks)[None] @ marks if weights else marks.sum(0, keepdim=True)
    each = spread(targets, *weights)[0].flatten() if weights else None
    # Predictions outside the known classes are left out.
    count = reading.columns
    kinds = [wanted.where(found == wanted, count), found.clamp(max=count), wanted]
    return torch.cat([torch.bincount(one, each, minlength=count)[:count] for one in kinds])[None]


@part("f1")
@made
def f1() -> Metric:
    """F1 score, the mean over the classes (macro)."""
    return _of_counts("f1", lambda hits, predictions, labels: 2 * hits / (predictions + labels))


@part("precision")
@made
def precision() -> Metric:
    """Share of correct predictions of a class, the mean over the classes (macro)."""
    return _of_counts("precision", lambda hits, predictions, labels: hits / predictions)


@part("recall")
@made
def recall() -> Metric:
    """Share of the labels of a class that are predicted, the mean over the classes (macro)."""
    return _of_counts("recall", lambda hits, predictions, labels: hits / labels)


@part("balanced_accuracy")
@made
def balanced_accuracy() -> Metric:
    """Accuracy of each class, the mean over the classes that occur."""
    return _of_counts("balanced_accuracy", lambda hits, predictions, labels: hits / labels, torch.nan)


Ranking = Callable[[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64] | None], float]
"""(which labels are of a class, the scores of all for it, their weights) -> a figure of their order."""


def _of_each_class(name: str, figure: Ranking) -> Metric:
    """Make the mean of a figure of each class against all others, over the classes with both."""

    def function(reading: Reading, outputs: Tensor, targets: Tensor, *weights: Tensor) -> float:
        probabilities, wanted = reading.probabilities(outputs, targets)
        sample_weight = None
        if weights:
            each = spread(targets, *weights)[0].reshape(len(wanted), -1)[:, 0]
            kept = each > 0  # A class whose samples all have the weight 0 is not there.
            probabilities, wanted, sample_weight = probabilities[kept], wanted[kept], each[kept].numpy()
        if wanted.dim() == 1:
            wanted = one_hot(wanted, max(probabilities.shape[1], int(wanted.max()) + 1))
        columns = zip(wanted.bool().T, probabilities.T, strict=False)
        if not probabilities.isfinite().all():
            return float("nan")
        found = [
            figure(there.numpy(), scores.numpy(), sample_weight)
            for there, scores in columns
            if there.any() and not there.all()
        ]
        return sum(found) / len(found) if found else float("nan")

    def read(reading: Reading) -> Metric:
        return Metric(name=name, function=partial(function, reading), width=0, weighs=True)

    return replace(_of_labels(name, read), width=0)


def _area(
    present: NDArray[np.bool_], scores: NDArray[np.float64], weights: NDArray[np.float64] | None
) -> float:
    """Return the share of pairs of a label of the class and another in the right order; ties count half."""
    if weights is not None:
        from sklearn.metrics import roc_auc_score  # It takes a second to import.

        return float(roc_auc_score(present, scores, sample_weight=weights))
    own, others = scores[present], scores[~present]
    own.sort()  # Finding places in their order is ten times as fast.
    others.sort()
    below, up_to = (np.searchsorted(others, own, side) for side in ("left", "right"))
    return float((below.sum() + up_to.sum()) / (2 * len(own) * len(others)))


@part("auc")
@made
def auc() -> Metric:
    """Area under the ROC curve of each class against all others, the mean over the classes."""
    return _of_each_class("auc", _area)


def _precision_of_ranks(
    present: NDArray[np.bool_], scores: NDArray[np.float64], weights: NDArray[np.float64] | None
) -> float:
    from sklearn.metrics import average_precision_score  # It takes a second to import.

    return float(average_precision_score(present, scores, sample_weight=weights))


@part("average_precision")
@made
def average_precision() -> Metric:
    """Average precision of each class against all others, the mean over the classes."""
    return _of_each_class("average_precision", _precision_of_ranks)


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - align(outputs, targets)).abs()


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - align(outputs, targets)).square()


@part("mae")
@made
def mae() -> Metric:
    """Mean absolute error."""
    return Metric(name="mae", function=_absolute)


@part("mse")
@made
def mse() -> Metric:
    """Mean squared error."""
    return Metric(name="mse", function=_squared)


@part("rmse")
@made
def rmse() -> Metric:
    """Root of the mean squared error."""
    return Metric(name="rmse", function=_squared, figure=lambda sums, labels: mean(sums, labels) ** 0.5)


@part("r2")
@made
def r2() -> Metric:
    """Coefficient of determination, the mean over the numbers of a target."""

    def read(reading: Reading) -> Metric:
        # Deviations from about the mean: their squares lose no digits where the mean is large.
        centre = reading.targets.cpu().reshape(len(reading.targets), -1).double().mean(0)
        function = partial(_deviations, centre)
        return Metric(name="r2", function=function, width=3 * len(centre), figure=_determination)

    return Metric(name="r2", function=_squared, takes=(AMOUNTS, FLAGS), read=read)


def _deviations(centre: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = targets.reshape(len(targets), -1).double()
    errors = outputs.reshape(wanted.shape).double() - wanted
    deviations = wanted - centre.to(wanted.device)
    return torch.cat([deviations, deviations.square(), errors.square()], 1)


def _determination(sums: Tensor, labels: float) -> float:
    """Return R²; as in scikit-learn, equal targets give 1 if the outputs are equal too, else 0."""
    total, squares, errors = sums.view(3, -1)
    spread = squares - total.square() / labels
    # The spread of equal targets is rounding.
    spread = spread.where(spread > 1e-12 * squares, 0.0)
    constant = (errors > 0).double().neg()
    return float((1 + torch.where(spread > 0, -errors / spread, constant)).mean())
