"""The scores of a cross-validation, from what each fold's model predicts for the samples that it never saw.

    fold 0    held out: 3 7 8     score 0.91   ┐ mean and standard deviation over the folds
    fold 1    held out: 0 2 5     score 0.88   │
    fold 2    held out: 1 4 6     score 0.93   ┘
    all       0 1 2 3 4 5 6 7 8   score 0.907    out of fold: each prediction counts once

Needs no torch.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData, UnknownName
from tutti.records.files import refusing, replace_file
from tutti.records.predictions import Predictions
from tutti.records.texts import better_by_name, is_share

Array = NDArray[Any]

NO_LABEL: Final = -100
"""The class number of a sample that has no label, as in `tutti.data.targets`."""

TOP: Final = 5


@dataclass(frozen=True)
class Measure:
    """A figure of predictions.

    Attributes:
        function: of outputs and targets, one row for each sample, or for each label where every position of a
            sample has one.
        better: whether "higher" or "lower" is.
        share: it is a share of the samples, so that differences are told in points of 100.
        of_classes: it compares classes, or labels of 0 or 1.
        ranks: it takes the probabilities of the classes, of shape (labels, classes), and not what they mean.
        computed: it is a metric that runs have computed themselves, on what they hold out.
    """

    function: Callable[[Array, Array], float]
    better: str
    share: bool = False
    of_classes: bool = True
    ranks: bool = False
    computed: bool = False

    def rows_of(self, found: Predictions, amounts: bool, flags: bool = False) -> tuple[Array, Array]:
        """Return the outputs and targets that it takes, of what has a label.

        Args:
            found: predictions.
            amounts: as for `score_folds`.
            flags: likewise.
        """
        return _probabilities(found, amounts, flags) if self.ranks else labelled(found, amounts)


@dataclass(frozen=True)
class Scores:
    """The scores of one candidate over all folds.

    Attributes:
        metric: its name.
        folds: the score of each; NaN where there is none.
        samples: how many each holds out.
        out_of_fold: over all predictions together.
        per_class: the share of the samples of each class that are predicted right; NaN for a class without
            samples. Empty without classes.
        confusion: of shape (classes, classes): rows are the true classes. None without classes.
    """

    metric: str
    folds: tuple[float, ...]
    samples: tuple[int, ...]
    out_of_fold: float
    per_class: tuple[float, ...] = ()
    confusion: NDArray[np.int64] | None = None

    @property
    def known(self) -> list[float]:
        """The scores of the folds that have one."""
        return [score for score in self.folds if math.isfinite(score)]

    @property
    def mean(self) -> float:
        """The mean over the folds that have a score; NaN if none has."""
        return float(np.mean(self.known)) if self.known else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation over the folds that have a score; NaN for fewer than two."""
        return float(np.std(self.known, ddof=1)) if len(self.known) > 1 else math.nan

    @property
    def missing(self) -> list[int]:
        """The folds that have no score."""
        return [number for number, score in enumerate(self.folds) if not math.isfinite(score)]


def score_folds(
    folds: Sequence[Predictions | None],
    metric: str = "auto",
    classes: int | None = None,
    amounts: bool = False,
    flags: bool = False,
) -> Scores:
    """Score the predictions of all folds.

    Args:
        folds: the predictions of each; None of a fold that has none.
        metric: a name in `MEASURES`; "auto" is accuracy for classes, mae for amounts.
        classes: how many there are; None: as many as the outputs are, or as are seen.
        amounts: a model with a single output approaches the class number or the label itself, and gives no
            logit.
        flags: each output is a logit of its own, whether or not the targets are classes.

    Raises:
        UnknownName: there is no such metric.
        BadData: no fold has predictions, or those of two do not fit each other.
    """
    there = [found for found in folds if found is not None]
    if not there:
        raise BadData("no fold has predictions, so there is nothing to score; train at least one")
    shapes = {(found.outputs.shape[1:], found.targets.shape[1:], found.targets.dtype.kind) for found in there}
    if len(shapes) > 1:
        raise BadData(f"the predictions of the folds have different shapes: {sorted(map(str, shapes))}")
    labels = there[0].targets.dtype.kind in "iu"
    name = ("accuracy" if labels else "mae") if metric == "auto" else metric
    if name not in MEASURES:
        raise UnknownName("metric", name, MEASURES)
    measure = MEASURES[name]
    if amounts and not labels and measure.of_classes and not measure.ranks:
        # Above the middle between 0 and 1 a label is set, as a logit above 0 says.
        folds = [None if one is None else replace(one, outputs=one.outputs - 0.5) for one in folds]
        there = [one for one in folds if one is not None]
    flat = [None if found is None else measure.rows_of(found, amounts, flags) for found in folds]
    together = out_of_fold(there)
    confusion = _confusion(*labelled(together, amounts), classes) if labels else None
    return Scores(
        name,
        tuple(math.nan if one is None else _score(measure.function, *one) for one in flat),
        tuple(0 if found is None else len(found.rows) for found in folds),
        _score(measure.function, *measure.rows_of(together, amounts, flags)),
        () if confusion is None else _per_class(confusion),
        confusion,
    )


def computed_scores(
    folds: Sequence[Predictions | None],
    metric: str,
    values: Sequence[float],
    classes: int | None = None,
    amounts: bool = False,
) -> Scores:
    """Return the scores by a metric that runs have computed; over all predictions together there is none.

    Args:
        folds: the predictions of each; None of a fold that has none.
        metric: as for `measure_of`.
        values: of each fold; NaN where there is none.
        classes: as for `score_folds`.
        amounts: likewise.
    """
    there = [found for found in folds if found is not None]
    samples = tuple(0 if found is None else len(found.rows) for found in folds)
    if not there or there[0].targets.dtype.kind not in "iu":
        return Scores(metric, tuple(values), samples, math.nan)
    confusion = _confusion(*labelled(out_of_fold(there), amounts), classes)
    return Scores(metric, tuple(values), samples, math.nan, _per_class(confusion), confusion)


def out_of_fold(folds: Sequence[Predictions]) -> Predictions:
    """Return the predictions of all folds together, by the samples' numbers; several repeats give several."""
    rows, outputs, targets = (
        np.concatenate([getattr(found, part) for found in folds]) for part in ("rows", "outputs", "targets")
    )
    order = np.argsort(rows, kind="stable")
    return Predictions(rows[order], outputs[order], targets[order])


def score_lines(
    candidates: Mapping[str, Scores], labels: Sequence[str] = ()
) -> Iterator[tuple[str, str, str, int, float]]:
    """Yield the lines of the table of scores: candidate, metric, what of, samples, score.

    Args:
        candidates: the scores by the name of what was trained.
        labels: the classes' names.
    """
    for name, scores in candidates.items():
        for number, (score, samples) in enumerate(zip(scores.folds, scores.samples, strict=True)):
            yield name, scores.metric, f"fold {number}", samples, score
        total = sum(scores.samples)
        yield name, scores.metric, "mean", total, scores.mean
        yield name, scores.metric, "standard deviation", total, scores.deviation
        yield name, scores.metric, "out of fold", total, scores.out_of_fold
        if scores.confusion is not None:
            counts = scores.confusion.sum(1)
            for label, (score, count) in enumerate(zip(scores.per_class, counts, strict=True)):
                called = f"class {labels[label]}" if label < len(labels) else f"class {label}"
                yield name, "accuracy", called, int(count), score


def write_scores(path: Path, candidates: Mapping[str, Scores], labels: Sequence[str] = ()) -> None:
    """Write the scores of all candidates as a table; a score that there is none of is an empty cell.

    Args:
        path: of the CSV file.
        candidates: the scores by the name of what was trained.
        labels: the classes' names.

    Raises:
        BadRunFolder: the file cannot be written.
    """
    header = "name", "metric", "of", "samples", "score"
    lines = ((*line, _cell(score)) for *line, score in score_lines(candidates, labels))
    write_table(path, [header, *lines])


def write_table(path: Path, lines: Sequence[Sequence[object]]) -> None:
    """Write a CSV file: whole, or not at all.

    Raises:
        BadRunFolder: it cannot be written.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    with refusing(path):
        replace_file(path, text.getvalue().encode())


def _cell(score: float) -> str:
    return repr(score) if math.isfinite(score) else ""


def _score(measure: Callable[[Array, Array], float], outputs: Array, targets: Array) -> float:
    """Return a figure; NaN where no sample has a label, or an output is no finite number."""
    if not len(targets) or not np.isfinite(outputs).all():
        return math.nan
    return float(measure(outputs, targets))


def labelled(found: Predictions, amounts: bool) -> tuple[Array, Array]:
    """Return outputs and targets of what has a label; of a label for each position one row for each."""
    outputs, targets = found.outputs, found.targets
    if targets.dtype.kind not in "iu":
        return outputs, targets
    if outputs.ndim == targets.ndim + 1 and outputs.shape[1] > 1:
        outputs = np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1])
    else:
        # A single output: of a logit the sign tells the class, of an amount the nearest whole number.
        single = outputs.reshape(targets.shape).ravel()
        right = np.maximum(np.rint(single), 0) if amounts else (single > 0).astype(single.dtype)
        outputs = np.where(np.isfinite(single), right, np.nan)[:, None]
    kept = targets.ravel() != NO_LABEL
    return outputs[kept], targets.ravel()[kept]


def _probabilities(found: Predictions, amounts: bool, flags: bool) -> tuple[Array, Array]:
    """Return the probability of each class, or of each label of 0 or 1, and the true ones.

    Outputs that approach numbers are taken as they are: their order is that of probabilities.
    """
    outputs, targets = found.outputs.astype(np.float64), found.targets
    if flags and not amounts:
        from scipy import special

        outputs = special.expit(outputs)
    if targets.dtype.kind == "f" and targets[:1].size > 1:
        return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1) > 0
    if targets.dtype.kind in "iu" and outputs.ndim == targets.ndim + 1 and outputs.shape[1] > 1:
        outputs = np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1])
        if not amounts and not flags:
            from scipy import special  # Takes a while.

            outputs = special.softmax(outputs, axis=1)
    else:
        single = outputs.reshape(-1)
        outputs = np.stack([-single, single], axis=1)
    wanted = targets.reshape(-1).astype(np.int64)
    kept = wanted != NO_LABEL
    return outputs[kept], wanted[kept]


def _ranking(name: str) -> Callable[[Array, Array], float]:
    """Return a figure of scikit-learn by its name there: of each class against all others, the mean."""

    def figure(probabilities: Array, targets: Array) -> float:
        from sklearn import metrics

        wanted = targets if targets.ndim > 1 else targets[:, None] == np.arange(probabilities.shape[1])
        found = [
            float(getattr(metrics, name)(there, scores))
            for scores, there in zip(probabilities.T, wanted.T, strict=True)
            if there.any() and not there.all()
        ]
        return sum(found) / len(found) if found else math.nan

    return figure


def _predicted(outputs: Array, targets: Array) -> Array:
    """Return the class that each output means; of float targets, whether each flag is set."""
    if targets.dtype.kind == "f":
        return (outputs > 0).reshape(targets.shape)
    if outputs.shape[1] == 1:
        return outputs[:, 0].astype(np.int64)
    found: Array = outputs.argmax(1)
    return found


def _confusion(outputs: Array, targets: Array, classes: int | None) -> NDArray[np.int64]:
    """Count the samples of each class by the class that is predicted; there may be more than `classes`."""
    finite = np.isfinite(outputs).all(1)
    targets, found = targets[finite], _predicted(outputs[finite], targets[finite])
    most = max(classes or 2, outputs.shape[1], *(int(part.max(initial=0)) + 1 for part in (targets, found)))
    if not len(targets):
        return np.zeros((most, most), np.int64)
    from sklearn import metrics  # Takes a second.

    counts: NDArray[np.int64] = metrics.confusion_matrix(targets, found, labels=range(most))
    return counts


def _per_class(confusion: NDArray[np.int64]) -> tuple[float, ...]:
    return tuple(
        int(row[label]) / int(row.sum()) if row.any() else math.nan for label, row in enumerate(confusion)
    )


def _accuracy(outputs: Array, targets: Array) -> float:
    return float((_predicted(outputs, targets) == targets).mean())


def _flags(outputs: Array, targets: Array) -> list[tuple[Array, Array]] | None:
    """Return what is predicted and what is true of each of several labels of 0 or 1.

    Labels that are neither there nor predicted are left out. None: a sample has one class, or one label.
    """
    if targets.dtype.kind != "f" or targets[:1].size < 2:
        return None
    found, wanted = (one.reshape(len(targets), -1).T > 0 for one in (outputs, targets))
    return [(one, true) for one, true in zip(found, wanted, strict=True) if one.any() or true.any()]


def _mean(scores: Sequence[float]) -> float:
    return float(np.mean(scores)) if scores else math.nan


def _balanced_accuracy(outputs: Array, targets: Array) -> float:
    if (flags := _flags(outputs, targets)) is not None:
        return _mean([float(found[wanted].mean()) for found, wanted in flags if wanted.any()])
    right = _predicted(outputs, targets) == targets
    return float(np.mean([right[targets == label].mean() for label in np.unique(targets)]))


def _macro(name: str) -> Callable[[Array, Array], float]:
    """Return a score of scikit-learn by its name there: the mean over the classes."""

    def score(outputs: Array, targets: Array) -> float:
        from sklearn import metrics

        of_one = partial(getattr(metrics, name), zero_division=0.0)
        if (flags := _flags(outputs, targets)) is not None:
            return _mean([of_one(wanted, found) for found, wanted in flags])
        return float(of_one(targets, _predicted(outputs, targets), average="macro"))

    return score


def _top5(outputs: Array, targets: Array) -> float:
    if outputs.ndim != 2 or outputs.shape[1] == 1:
        raise BadData("metric 'top5' needs one score for each class; choose another")
    count = min(TOP, outputs.shape[1])
    best = np.argsort(-outputs, axis=1, kind="stable")[:, :count]
    return float((best == targets[:, None]).any(1).mean())


def _of_amounts(name: str) -> Callable[[Array, Array], float]:
    """Return a figure of scikit-learn by its name there, over all numbers of all samples."""

    def figure(outputs: Array, targets: Array) -> float:
        from sklearn import metrics

        rows = len(targets)
        wanted = targets.reshape(rows, -1).astype(np.float64)
        if targets.dtype.kind in "iu" and outputs.shape[1] > 1:
            wanted = np.eye(outputs.shape[1])[targets]
        return float(getattr(metrics, name)(wanted, outputs.reshape(rows, -1).astype(np.float64)))

    return figure


_mse = _of_amounts("mean_squared_error")


MEASURES: Final[dict[str, Measure]] = {
    "accuracy": Measure(_accuracy, "higher", share=True),
    "balanced_accuracy": Measure(_balanced_accuracy, "higher", share=True),
    "f1": Measure(_macro("f1_score"), "higher"),
    "precision": Measure(_macro("precision_score"), "higher", share=True),
    "recall": Measure(_macro("recall_score"), "higher", share=True),
    "auc": Measure(_ranking("roc_auc_score"), "higher", ranks=True),
    "average_precision": Measure(_ranking("average_precision_score"), "higher", ranks=True),
    "top5": Measure(_top5, "higher", share=True),
    "mae": Measure(_of_amounts("mean_absolute_error"), "lower", of_classes=False),
    "mse": Measure(_mse, "lower", of_classes=False),
    "rmse": Measure(lambda outputs, targets: _mse(outputs, targets) ** 0.5, "lower", of_classes=False),
    "r2": Measure(_of_amounts("r2_score"), "higher", of_classes=False),
}
"""The figures by name. Those that `tutti.training.metrics` has, too, are the same."""


def measure_of(metric: str) -> Measure:
    """Return the figure by which scores are compared.

    Args:
        metric: a name in `MEASURES`; or of a metric that runs compute: "hits", or "hits:lower" where the name
            does not say which values are better.
    """
    if metric in MEASURES:
        return MEASURES[metric]
    name, _, better = metric.partition(":")
    return Measure(_of_runs, better or better_by_name(name) or "", is_share(name), computed=True)


def _of_runs(outputs: Array, targets: Array) -> float:
    raise NotImplementedError("the runs have computed it")
