"""Ways to combine candidates, each fitted to predictions for samples that the candidates never saw.

Each candidate gets a weight, 0 or more; the weights add up to 1. The loss is the negative log-likelihood of
probabilities, the squared error of amounts. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import UnknownName
from tutti.records.ensemble import Combination
from tutti.records.output_kinds import LEAST, Kind
from tutti.studies.ensemble.library import Library

Weights = NDArray[np.float64]

ROUNDS: Final = 50
"""The candidates that greedy selection adds, at most."""

NEGLIGIBLE: Final = 1e-6
"""A candidate with less weight is left out."""


def fit(method: str, library: Library) -> Combination:
    """Fit a combination of all candidates of a library, which leaves out those that get no weight.

    Raises:
        UnknownName: there is no such method.
    """
    if method not in METHODS:
        raise UnknownName("value", method, METHODS, of="--method")
    return METHODS[method](library)


def combine(found: Combination, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values of the ensemble.

    Args:
        found: the combination.
        values: of its candidates, in their order, of shape (candidates, samples, numbers).
    """
    mixed: NDArray[np.float64] = np.tensordot(np.array(found.weights), values, 1)
    return mixed


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


METHODS: Final[dict[str, Callable[[Library], Combination]]] = {
    "mean": _mean,
    "greedy": _greedy,
}
"""The ways to combine candidates, by name."""
