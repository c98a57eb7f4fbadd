"""The scores of a cross-validation: each fold has a model, scored on its held-out samples.

    fold 0    held out: 3 7 8    score 0.91   ┐
    fold 1    held out: 0 2 5    score 0.88   │ mean and standard deviation over the folds
    fold 2    held out: 1 4 6    score 0.93   ┘

Each run computes its score, on each held-out sample once. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tutti.records.run import Evaluation, Summary
from tutti.studies.farms import write_table
from tutti.studies.score import Score


@dataclass(frozen=True)
class FoldScores:
    """The scores of one candidate over all folds.

    Attributes:
        score: the figure.
        folds: its value for each fold; NaN if missing.
        samples: the number of held-out samples of each fold.
        seconds: the training time of each fold; NaN if missing.
        confusion: samples of each class (row) by the predicted class (column), over all folds; None without
            classes. A further column counts predictions of no known class.
        weighted: the samples have weights, whose sums are in `confusion`.
    """

    score: Score
    folds: tuple[float, ...]
    samples: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    confusion: list[list[float]] | None = field(default=None, repr=False)
    weighted: bool = False

    @classmethod
    def of(cls, score: Score, runs: Sequence[Summary | None]) -> FoldScores:
        """Return the scores of a candidate's runs; None for a fold without one."""
        held_out = [None if run is None else run.validation for run in runs]
        known = [one for one in held_out if one is not None]
        counts = [np.array(one.confusion) for one in known if one.confusion]
        width = max((one.shape[1] for one in counts), default=0)
        counts = [np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in counts]
        return cls(
            score,
            tuple(math.nan if run is None else score.of(run) for run in runs),
            tuple(0 if one is None else one.samples for one in held_out),
            tuple(math.nan if run is None else run.seconds for run in runs),
            np.sum(counts, axis=0).tolist() if counts else None,
            any(one.weighted for one in known),
        )

    @property
    def known(self) -> list[float]:
        """The scores that are not missing."""
        return [value for value in self.folds if math.isfinite(value)]

    @property
    def missing(self) -> list[int]:
        """The folds without a score."""
        return [number for number, value in enumerate(self.folds) if not math.isfinite(value)]

    @property
    def mean(self) -> float:
        """The mean over the folds that have a score; NaN if none has."""
        return float(np.mean(self.known)) if self.known else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation over the folds that have a score; NaN for fewer than two."""
        return float(np.std(self.known, ddof=1)) if len(self.known) > 1 else math.nan

    @property
    def seconds_each(self) -> float:
        """The mean training time of a fold; NaN if none has been trained."""
        known = [value for value in self.seconds if math.isfinite(value)]
        return float(np.mean(known)) if known else math.nan

    def class_accuracy(self) -> list[float | None]:
        """Return the accuracy of each class, in [0, 1]; None for a class without samples."""
        return Evaluation(sum(self.samples), 0.0, confusion=self.confusion).class_accuracy()


def best_first(scores: Mapping[str, FoldScores]) -> list[str]:
    """Return the candidates by their means, the best first; those with missing scores come last."""

    def place(name: str) -> tuple[bool, bool, float]:
        one = scores[name]
        # A candidate that diverges on hard folds may look good on the others. NaN has no order.
        return bool(one.missing), math.isnan(one.mean), -one.mean if one.score.higher else one.mean

    return sorted(scores, key=place)


def write_scores(path: Path, candidates: Mapping[str, FoldScores], labels: Sequence[str] = ()) -> None:
    """Write the scores of all candidates as a CSV table; a missing score is an empty cell."""
    lines: list[tuple[object, ...]] = [("name", "metric", "of", "samples", "score")]
    for name, one in candidates.items():
        known, total = (name, str(one.score)), sum(one.samples)
        for number, (value, samples) in enumerate(zip(one.folds, one.samples, strict=True)):
            lines.append((*known, f"fold {number}", samples, _cell(value)))
        lines.append((*known, "mean", total, _cell(one.mean)))
        lines.append((*known, "standard deviation", total, _cell(one.deviation)))
        for label, share in enumerate(one.class_accuracy()):
            called = f"class {labels[label] if label < len(labels) else label}"
            count = "" if one.weighted else f"{sum((one.confusion or [])[label]):.10g}"
            lines.append((name, "accuracy", called, count, "" if share is None else repr(share)))
    write_table(path, lines)


def _cell(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""
