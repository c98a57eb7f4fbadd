"""Differences between candidates, as far as the scores of folds tell any: the corrected resampled t-test.

Folds share training samples, so their scores are not independent, and a plain t-test finds differences where
there are none. Nadeau and Bengio (Inference for the generalization error, Machine Learning 52, 2003, section
3) enlarge the variance of the mean difference over J folds from s^2 / J to

    (1/J + n_test/n_train) s^2

Over all pairs of candidates, p is adjusted by Holm's step-down method (Scandinavian Journal of Statistics 6,
1979), and each interval is widened as its p is: it leaves out 0 exactly where a difference is told. Needs no
torch.
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
from tutti.studies.cross_validation.scores import Scores, measure_of, write_table

ALPHA: Final = 0.05
"""A difference is told when p, adjusted, is below this."""

CONFIDENCE: Final = 1 - ALPHA
"""Of the interval of a difference."""

FEW: Final = 3
"""With fewer folds the interval is wider than scores can differ, and the sentence leaves it out."""

ROUNDING: Final = 16 * float(np.finfo(np.float64).eps)
"""Differences that vary by less than this, relative to the scores, are the same but for rounding."""


@dataclass(frozen=True)
class Difference:
    """The difference between two candidates over the folds that both have a score of.

    Attributes:
        first: the name of one candidate.
        second: that of the other.
        metric: of the scores.
        folds: how many both have.
        mean: of the first's scores - the second's; NaN without a fold.
        low: the lower end of its interval, adjusted as p is; NaN if there is no test.
        high: the upper one.
        t: the statistic; NaN if there is no test.
        p: two-sided; NaN if there is no test.
        adjusted: p, adjusted for all pairs that are tested.
        pairs: how many these are.
        why: why there is no test; empty if there is one.
    """

    first: str
    second: str
    metric: str
    folds: int
    mean: float
    low: float = math.nan
    high: float = math.nan
    t: float = math.nan
    p: float = math.nan
    adjusted: float = math.nan
    pairs: int = 1
    why: str = ""

    @property
    def told(self) -> bool:
        """True if one of the two is better."""
        return self.adjusted < ALPHA

    @property
    def better(self) -> str | None:
        """The name of the better one; None: that cannot be told."""
        if not self.told:
            return None
        return self.first if (self.mean > 0) == (measure_of(self.metric).better == "higher") else self.second

    @property
    def sentence(self) -> str:
        """The result in words."""
        if self.why:
            return f"nothing can be told of {self.first} and {self.second}: {self.why}"
        adjusted = f" (adjusted for {self.pairs} comparisons)" if self.pairs > 1 else ""
        few = f", of {self.folds} folds only" if self.folds < FEW else ""
        by = amount_of(abs(self.mean), self.metric)
        low, high = (self.low, self.high) if self.mean >= 0 else (-self.high, -self.low)
        interval = "" if self.folds < FEW else f"{self._interval(low, high)}, "
        figures = f"{by}, {interval}{_p(self.adjusted)}{adjusted}{few}"
        if self.better is None:
            names = (self.first, self.second) if self.mean >= 0 else (self.second, self.first)
            return f"no difference can be told between {' and '.join(names)}: {figures}"
        other = self.second if self.better == self.first else self.first
        return f"{self.better} is better than {other} by {figures}"

    def _interval(self, low: float, high: float) -> str:
        ends = " to ".join(_number(end, self.metric) for end in (low, high))
        return f"{100 * CONFIDENCE:.0f} % interval {ends}"


def none_told(differences: Sequence[Difference]) -> str:
    """Return one sentence for several comparisons, all with a test, none of which tells a difference."""
    least = min(differences, key=lambda one: one.adjusted)
    few = f", of {least.folds} folds only" if least.folds < FEW else ""
    return (
        f"no difference can be told between any two of the candidates: the smallest p is of {least.first} "
        f"and {least.second}, {_p(least.adjusted)} (adjusted for {least.pairs} comparisons){few}"
    )


def amount_of(value: float, metric: str) -> str:
    """Return a difference in words: of shares in points of 100."""
    unit = "points" if measure_of(metric).share else f"in {metric}"
    return f"{_number(value, metric)} {unit}"


def _number(value: float, metric: str) -> str:
    # Nothing is -0.00.
    return f"{round(100 * value, 2) + 0.0:.2f}" if measure_of(metric).share else f"{value + 0.0:.4g}"


def corrected_test(differences: Sequence[float], ratio: float) -> tuple[float, float, float]:
    """Test whether the mean of differences between two candidates is 0.

    Args:
        differences: of each fold; two or more, that are not all the same.
        ratio: the held-out samples of a fold / those that it trains on.

    Returns:
        t, p (two-sided, with a degree of freedom less than folds), and the standard error of the mean.
    """
    from scipy import stats  # Takes half a second.

    count = len(differences)
    error = math.sqrt((1 / count + ratio) * float(np.var(differences, ddof=1)))
    t = float(np.mean(differences)) / error
    return t, float(2 * stats.t.sf(abs(t), count - 1)), error


def holm(values: Sequence[float]) -> list[float]:
    """Adjust values of p for being several: the smallest by their number, the next by one less, and so on.

    Args:
        values: of p, in any order; NaN is no test, stays NaN, and does not count.
    """
    found = np.array(values, dtype=np.float64)
    tested = np.flatnonzero(~np.isnan(found))
    order = tested[np.argsort(found[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    found[order] = np.minimum(np.maximum.accumulate(found[order] * factors), 1)
    return [float(value) for value in found]


def compare(candidates: Mapping[str, Scores], ratios: Sequence[float]) -> list[Difference]:
    """Compare each candidate with each other one.

    Args:
        candidates: the scores by the name of what was trained, all of the same folds.
        ratios: of each fold, the held-out samples / those that it trains on.

    Raises:
        BadData: the scores are of other folds, or of different metrics.
    """
    for name, scores in candidates.items():
        if len(scores.folds) != len(ratios):
            raise BadData(
                f"{name} has the scores of {len(scores.folds)} folds, and there are {len(ratios)}; compare "
                "scores of the same folds"
            )
    kinds = {scores.metric for scores in candidates.values()}
    if len(kinds) > 1:
        raise BadData(
            f"the scores are of different metrics ({', '.join(sorted(kinds))}); compare those of one"
        )
    found = [
        _difference(first, second, candidates, ratios)
        for first, second in itertools.combinations(candidates, 2)
    ]
    adjusted = holm([one.p for one in found])
    pairs = sum(not math.isnan(value) for value in adjusted)
    return [_adjust(one, p, pairs) for one, p in zip(found, adjusted, strict=True)]


def write_comparison(path: Path, differences: Sequence[Difference]) -> None:
    """Write what was found out of all pairs as a table; a figure that there is none of is an empty cell.

    Args:
        path: of the CSV file.
        differences: as `compare` has found them.

    Raises:
        BadRunFolder: the file cannot be written.
    """
    header = "first", "second", "metric", "folds", "difference", "low", "high", "t", "p", "p_holm", "result"
    lines = [
        (
            *(one.first, one.second, one.metric, one.folds),
            *(
                "" if math.isnan(x) else repr(x)
                for x in (one.mean, one.low, one.high, one.t, one.p, one.adjusted)
            ),
            one.sentence,
        )
        for one in differences
    ]
    write_table(path, [header, *lines])


def _difference(
    first: str, second: str, candidates: Mapping[str, Scores], ratios: Sequence[float]
) -> Difference:
    """Compare two candidates; p and the interval are not adjusted yet."""
    scores = [np.array(candidates[name].folds, dtype=np.float64) for name in (first, second)]
    both = np.isfinite(scores[0]) & np.isfinite(scores[1])
    one, other = (found[both] for found in scores)
    differences, metric, folds = one - other, candidates[first].metric, int(both.sum())
    mean = float(differences.mean()) if folds else math.nan
    found = Difference(first, second, metric, folds, mean)
    if folds < 2:
        has = "no fold has" if folds == 0 else "a single fold has"
        return replace(found, why=f"{has} a score of both, and a comparison needs two folds at least")
    size = max(float(np.abs(one).max()), float(np.abs(other).max()))
    if float(np.ptp(differences)) <= ROUNDING * size:
        if abs(mean) <= ROUNDING * size:
            return replace(found, mean=0.0, why="they have the same score in each fold")
        same = amount_of(abs(mean), metric)
        return replace(
            found, why=f"they differ by the same {same} in each fold, which leaves nothing to measure by"
        )
    from scipy import stats

    t, p, error = corrected_test(differences.tolist(), float(np.mean(np.array(ratios)[both])))
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, folds - 1)) * error
    return replace(found, t=t, p=p, low=mean - margin, high=mean + margin)


def _adjust(one: Difference, adjusted: float, pairs: int) -> Difference:
    """Put in the adjusted p, and widen the interval to the level at which that p would be ALPHA."""
    if not one.p < adjusted:
        return replace(one, adjusted=adjusted, pairs=pairs)
    from scipy import stats

    quantiles = stats.t.isf([ALPHA * one.p / adjusted / 2, ALPHA / 2], one.folds - 1)
    margin = (one.high - one.low) / 2 * float(quantiles[0] / quantiles[1])
    return replace(one, adjusted=adjusted, pairs=pairs, low=one.mean - margin, high=one.mean + margin)


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
