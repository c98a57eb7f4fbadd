"""Ways to combine candidates, each fitted to predictions for samples that the candidates never saw.

All but stacking give each candidate a weight, 0 or more, that add up to 1, and have the loss in mind: the
negative log-likelihood of probabilities, the squared error of amounts. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special
from sklearn.linear_model import LogisticRegression, RidgeCV

from tutti.errors import BadData, UnknownName
from tutti.records.ensemble import Combination
from tutti.records.output_kinds import LEAST, Kind
from tutti.studies.ensemble.library import Library

Weights = NDArray[np.float64]

ROUNDS: Final = 50
"""The candidates that greedy selection adds, at most."""

NEGLIGIBLE: Final = 1e-6
"""A candidate with less weight is left out."""

UNSEEN: Final = -100.0
"""The logarithm, up to a constant, of the probability that stacking gives a class without samples."""


def fit(method: str, library: Library) -> Combination:
    """Fit a combination of all candidates of a library, which leaves out those that get no weight.

    Raises:
        UnknownName: there is no such method.
        BadData: it is not for such targets.
    """
    if method not in METHODS:
        raise UnknownName("value", method, METHODS, of="--method")
    return METHODS[method](library)


def combine(found: Combination, kind: Kind, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values of the ensemble.

    Args:
        found: the combination.
        kind: of the values.
        values: of its candidates, in their order, of shape (candidates, samples, numbers).
    """
    if found.weights:
        mixed: NDArray[np.float64] = np.tensordot(np.array(found.weights), values, 1)
        return mixed
    line = _features(values) @ np.array(found.coefficients).T + np.array(found.intercepts)
    if kind is Kind.CLASSES:
        shares: NDArray[np.float64] = special.softmax(line, axis=1)
        return shares
    return np.asarray(line)


def loss_of(library: Library, values: NDArray[Any]) -> float:
    """Return the mean loss of values for the samples of a library."""
    if library.kind is Kind.AMOUNTS:
        return float(np.mean((values - library.truth) ** 2))
    return float(-np.log(np.maximum(_likelihood(library, values), LEAST)).mean())


def _likelihood(library: Library, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the probability of what is true, which is linear in the values; of one candidate, or of each."""
    if library.kind is Kind.CLASSES:
        picked: NDArray[np.float64] = values[..., np.arange(len(library.targets)), library.targets]
        return picked
    truth = library.truth
    flags = truth * values + (1 - truth) * (1 - values)
    joined: NDArray[np.float64] = flags.reshape(*flags.shape[:-2], -1)
    return joined


def _weighted(method: str, library: Library, weights: Weights) -> Combination:
    kept = weights > NEGLIGIBLE
    shares = weights[kept] / weights[kept].sum()
    names = tuple(name for name, there in zip(library.names, kept, strict=True) if there)
    return Combination(method, names, tuple(shares.tolist()))


def _mean(library: Library) -> Combination:
    return _weighted("mean", library, np.full(len(library.names), 1 / len(library.names)))


def _best_weights(library: Library) -> Combination:
    """Find the weights of the least loss, which is convex in them."""
    count = len(library.names)
    if library.kind is Kind.AMOUNTS:
        errors = (library.values - library.truth).reshape(count, -1)
        products = errors @ errors.T / errors.shape[1]
        # The weights add up to 1, so the error of the mixture is the mixture of the errors.
        size = max(float(np.trace(products)) / count, np.finfo(np.float64).tiny)

        def loss(weights: Weights) -> tuple[float, Weights]:
            return float(weights @ products @ weights) / size, 2 * products @ weights / size

    else:
        likelihood = np.maximum(_likelihood(library, library.values), LEAST)

        def loss(weights: Weights) -> tuple[float, Weights]:
            mixed = weights @ likelihood
            return float(-np.log(mixed).mean()), -(likelihood / mixed).mean(1)

    found = optimize.minimize(
        loss,
        np.full(count, 1 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    # No mixture that can be looked up is better than the one that was searched for.
    tried: list[Weights] = [np.clip(found.x, 0, 1), *np.eye(count)]
    return _weighted("weighted", library, min(tried, key=lambda weights: loss(weights / weights.sum())[0]))


def _greedy(library: Library) -> Combination:
    """Select candidates one at a time, with replacement, each time the one that helps the mean most.

    Caruana, Niculescu-Mizil, Crew and Ksikes, Ensemble selection from libraries of models, ICML 2004. It
    begins with the best N candidates, with the N whose mean is best, and keeps the best mean on the way.
    """
    values = library.values
    order = np.argsort([loss_of(library, one) for one in values], kind="stable")
    means = np.cumsum(values[order], axis=0) / np.arange(1, len(order) + 1)[:, None, None]
    losses = [loss_of(library, one) for one in means]
    first = int(np.argmin(losses)) + 1
    counts = np.zeros(len(order), dtype=np.int64)
    counts[order[:first]] = 1
    best, least, total = counts.copy(), losses[first - 1], values[order[:first]].sum(0)
    for _ in range(ROUNDS):
        tried = [loss_of(library, (total + one) / (counts.sum() + 1)) for one in values]
        added = int(np.argmin(tried))
        counts[added] += 1
        total = total + values[added]
        if tried[added] < least:
            best, least = counts.copy(), tried[added]
    return _weighted("greedy", library, best / best.sum())


def _stacking(library: Library) -> Combination:
    """Learn a linear model of all candidates' values, which penalises large coefficients."""
    features, numbers = _features(library.values), library.values.shape[2]
    if library.kind is Kind.FLAGS:
        raise BadData("stacking is for classes and amounts, not for labels of 0 or 1; give --method weighted")
    if library.kind is Kind.AMOUNTS:
        ridge = RidgeCV(alphas=np.logspace(-6, 3, 10)).fit(features, library.truth)
        coefficients, intercepts = np.atleast_2d(ridge.coef_), np.atleast_1d(ridge.intercept_)
        return _stacked(library.names, coefficients, intercepts)
    seen = np.unique(library.targets)
    coefficients, intercepts = np.zeros((numbers, features.shape[1])), np.full(numbers, UNSEEN)
    if len(seen) == 1:
        intercepts[seen] = 0
        return _stacked(library.names, coefficients, intercepts)
    model = LogisticRegression(max_iter=1000).fit(features, library.targets)
    # Of two classes it has the line of the second alone: that of the first is 0.
    both = len(seen) == 2
    coefficients[seen] = np.vstack([0 * model.coef_, model.coef_]) if both else model.coef_
    intercepts[seen] = [0, *model.intercept_] if both else model.intercept_
    return _stacked(library.names, coefficients, intercepts)


def _stacked(names: tuple[str, ...], coefficients: Weights, intercepts: Weights) -> Combination:
    lines: Sequence[Sequence[float]] = coefficients.tolist()
    return Combination("stacking", names, (), tuple(map(tuple, lines)), tuple(intercepts.tolist()))


def _features(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of all candidates side by side, of shape (samples, candidates x numbers)."""
    return np.moveaxis(values, 0, 1).reshape(values.shape[1], -1)


METHODS: Final[dict[str, Callable[[Library], Combination]]] = {
    "mean": _mean,
    "weighted": _best_weights,
    "stacking": _stacking,
    "greedy": _greedy,
}
"""The ways to combine candidates, by name."""
