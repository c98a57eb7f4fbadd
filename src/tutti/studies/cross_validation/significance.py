"""Differences between candidates, by the scores of their folds: the corrected resampled t-test.

Folds share training samples, so their scores are not independent, and a plain t-test finds differences where
there are none. Nadeau and Bengio (Inference for the generalization error, Machine Learning 52, 2003, section
3) enlarge the variance of the mean difference over J folds from s^2 / J to

    (1/J + n_test/n_train) s^2

Over all pairs of candidates, p is adjusted by Holm's step-down method (Scandinavian Journal of Statistics 6,
1979). Each interval is widened accordingly: it excludes 0 exactly where the difference is significant. Needs
no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from tutti.errors import BadData
from tutti.studies.cross_validation.scores import FoldScores
from tutti.studies.farms import write_table
from tutti.studies.score import Score

ALPHA: Final = 0.05
"""A difference is significant if the adjusted p is below this."""

FEW: Final = 3
"""With fewer folds the interval is wider than scores can differ, and is not shown."""

ROUNDING: Final = 16 * float(np.finfo(np.float64).eps)
"""Differences that vary by less than this, relative to the scores, are equal up to rounding."""


@dataclass(frozen=True)
class Difference:
    """The difference between two candidates over the folds for which both have a score.

    Attributes:
        first: the name of one candidate.
        second: the name of the other.
        score: the figure.
        folds: the number of folds with both scores.
        mean: of the scores of `first` - those of `second`; NaN without a fold.
        error: the corrected standard error of the mean; NaN without a test.
        p: two-sided; NaN without a test.
        adjusted: p, adjusted for the number of tested pairs.
        pairs: that number.
        why: the reason why there is no test; empty if there is one.
    """

    first: str
    second: str
    score: Score
    folds: int
    mean: float
    error: float = math.nan
    p: float = math.nan
    adjusted: float = math.nan
    pairs: int = 1
    why: str = ""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, adjusted like p; NaN without a test."""
        from scipy import stats

        level = ALPHA * self.p / self.adjusted if self.p < self.adjusted else ALPHA
        margin = float(stats.t.isf(level / 2, max(1, self.folds - 1))) * self.error
        return self.mean - margin, self.mean + margin

    @property
    def better(self) -> str | None:
        """The name of the better candidate; None: the difference is not significant."""
        if not self.adjusted < ALPHA:
            return None
        return self.first if (self.mean > 0) == self.score.higher else self.second

    @property
    def sentence(self) -> str:
        """The result in words."""
        if self.why:
            return f"{self.first} and {self.second} cannot be compared: {self.why}"
        low, high = sorted(end if self.mean >= 0 else -end for end in self.interval)
        ends = f"{_number(low, self.score)} to {_number(high, self.score)}"
        figures = [
            _amount(abs(self.mean), self.score),
            *([] if self.folds < FEW else [f"{100 * (1 - ALPHA):.0f} % interval {ends}"]),
            f"{_p(self.adjusted)}{f' (adjusted for {self.pairs} comparisons)' if self.pairs > 1 else ''}",
            *([f"of {self.folds} folds only"] if self.folds < FEW else []),
        ]
        names = (self.first, self.second) if self.mean >= 0 else (self.second, self.first)
        if self.better is None:
            return f"no significant difference between {' and '.join(names)}: {', '.join(figures)}"
        other = self.second if self.better == self.first else self.first
        return f"{self.better} is better than {other} by {', '.join(figures)}"


def compare(candidates: Mapping[str, FoldScores], ratios: Sequence[float]) -> list[Difference]:
    """Compare all pairs of candidates; `ratios` are held-out / training samples for each fold."""
    for name, scores in candidates.items():
        if len(scores.folds) != len(ratios):
            raise BadData(f"{name} has the scores of {len(scores.folds)} folds, and there are {len(ratios)}")
    found = [
        _difference(first, second, candidates, ratios)
        for first, second in itertools.combinations(candidates, 2)
    ]
    adjusted = holm([one.p for one in found])
    pairs = sum(not math.isnan(value) for value in adjusted)
    return [replace(one, adjusted=p, pairs=pairs) for one, p in zip(found, adjusted, strict=True)]


def _difference(
    first: str, second: str, candidates: Mapping[str, FoldScores], ratios: Sequence[float]
) -> Difference:
    """Compare two candidates; p is not adjusted yet."""
    scores = np.array([candidates[name].folds for name in (first, second)], dtype=np.float64)
    both = np.isfinite(scores).all(0)
    differences, folds = (scores[0] - scores[1])[both], int(both.sum())
    difference = Difference(
        first, second, candidates[first].score, folds, float(differences.mean()) if folds else math.nan
    )
    if folds < 2:
        return replace(difference, why=f"they share the scores of {folds} folds, and a test needs two")
    if float(np.ptp(differences)) <= ROUNDING * float(np.abs(scores[:, both]).max()):
        same = _amount(abs(difference.mean), difference.score)
        return replace(difference, why=f"they differ by the same {same} in each fold")
    error, p = corrected_test(differences.tolist(), float(np.mean(np.array(ratios)[both])))
    return replace(difference, error=error, p=p)


def corrected_test(differences: Sequence[float], ratio: float) -> tuple[float, float]:
    """Return the corrected standard error of the mean difference, and the two-sided p of its being 0."""
    from scipy import stats  # Takes half a second.

    count = len(differences)
    error = math.sqrt((1 / count + ratio) * float(np.var(differences, ddof=1)))
    return error, float(2 * stats.t.sf(abs(float(np.mean(differences))) / error, count - 1))


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p values for their number. NaN, which means no test, stays NaN and does not count."""
    adjusted = np.array(values, dtype=np.float64)
    tested = np.flatnonzero(~np.isnan(adjusted))
    order = tested[np.argsort(adjusted[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(adjusted[order] * factors), 1)
    return [float(value) for value in adjusted]


def write_comparison(path: Path, differences: Sequence[Difference]) -> None:
    """Write the comparison of all pairs as a CSV table; a missing figure is an empty cell."""
    lines: list[tuple[object, ...]] = [
        ("first", "second", "metric", "folds", "difference", "low", "high", "p", "p_holm", "result")
    ]
    for one in differences:
        figures = (one.mean, *one.interval, one.p, one.adjusted)
        cells = ("" if math.isnan(value) else repr(value) for value in figures)
        lines.append((one.first, one.second, str(one.score), one.folds, *cells, one.sentence))
    write_table(path, lines)


def _amount(value: float, score: Score) -> str:
    """Return a difference in words; differences of shares are in points of 100."""
    return f"{_number(value, score)} {'points' if score.is_share else f'in {score}'}"


def _number(value: float, score: Score) -> str:
    # Avoid -0.00.
    return f"{round(100 * value, 2) + 0.0:.2f}" if score.is_share else f"{value + 0.0:.4g}"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
