"""The choice of an ensemble from a farm, and its score on held-out samples.

    fold held out     chosen on         scored on
    0                 folds 1 2 3 4     fold 0       an ensemble, and the best single candidate
    1                 folds 0 2 3 4     fold 1       the same
    ...
    none              all folds                      the ensemble that is saved

The samples of the held-out fold are left out of every repeat. The gain is the difference of the two scores
over the folds, with the corrected t-test, as between candidates. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData, BadOption, UnknownName
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.output_kinds import Kind, kind_of
from tutti.records.predictions import Predictions
from tutti.records.run_folder import PREDICTIONS, RunFolder, TrainedOn
from tutti.studies.cross_validation.result import job_name, question_of
from tutti.studies.cross_validation.scores import FoldScores
from tutti.studies.cross_validation.significance import Difference, compare
from tutti.studies.ensemble.library import Library, library_of

ENSEMBLE: Final = "the ensemble"
BEST: Final = "the best single model"

ROUNDS: Final = 50
"""The most candidates that greedy selection adds."""

Weights = dict[str, float]
"""The weights of candidates: each above 0, and 1 in all."""


@dataclass(frozen=True)
class Selection:
    """An ensemble, and its gain."""

    kind: Kind  # of the candidates' values
    weights: Weights
    scores: dict[str, FoldScores]  # of all candidates, and of `ENSEMBLE` and `BEST` as chosen for each fold
    gain: Difference  # between `ENSEMBLE` and `BEST`


def read_library(folder: FarmFolder) -> tuple[Library, list[str]]:
    """Return the predictions of the candidates that have finished all folds, and the names of the others."""
    question = question_of(folder)
    found, kinds, left_out = dict[str, list[Predictions]](), dict[str, Kind](), list[str]()
    for name in question["candidates"]:
        jobs = [job_name(name, number) for number in range(len(question["ratios"]))]
        if any(folder.state(job) is not JobState.FINISHED for job in jobs):
            left_out.append(name)
            continue
        found[name] = [Predictions.read(folder.job(job) / PREDICTIONS) for job in jobs]
        run = RunFolder(folder.job(jobs[0]))
        kinds[name] = kind_of(str(run.config().get("loss")), run.read(TrainedOn).classes)
    if not found:
        raise BadData(
            f"no candidate of {folder.path} has finished all folds; continue with 'tutti cv ... --resume "
            f"--out {folder.path}'"
        )
    return library_of(found, kinds), left_out


def choose(library: Library, ratios: list[float], method: str, top: int | None = None) -> Selection:
    """Choose an ensemble of the `top` best candidates, and score such choices on held-out folds."""
    if method not in METHODS:
        raise UnknownName("value", method, METHODS, of="--method")
    if top is not None and not 1 <= top <= len(library.names):
        there = f"{len(library.names)}: {', '.join(library.names)}"
        raise BadOption(f"--top is {top}, and the candidates that have finished are {there}")
    if len(ratios) < 2:
        raise BadData("an ensemble is scored on a held-out fold; cross-validate with two folds")
    scores: dict[str, list[float]] = {name: [] for name in (*library.names, ENSEMBLE, BEST)}
    for fold in range(len(ratios)):
        held_out, rest = library.fold(fold)
        for name, values in zip(library.names, held_out.values, strict=True):
            scores[name].append(held_out.scored(values))
        scores[ENSEMBLE].append(held_out.scored(combine(fit(rest, method, top), held_out)))
        scores[BEST].append(scores[_ranked(rest)[0]][fold])
    scores_of = {name: FoldScores(library.score, tuple(values)) for name, values in scores.items()}
    (gain,) = compare({name: scores_of[name] for name in (ENSEMBLE, BEST)}, ratios)
    return Selection(library.kind, fit(library, method, top), scores_of, gain)


def fit(library: Library, method: str, top: int | None = None) -> Weights:
    """Return the weights of the `top` best candidates, without zeros."""
    chosen = library.of(_ranked(library)[:top])
    weights = METHODS[method](chosen)
    return {name: float(weight) for name, weight in zip(chosen.names, weights, strict=True) if weight > 0}


def combine(weights: Weights, library: Library) -> NDArray[np.float64]:
    """Return the values of an ensemble for the samples of a library: (samples, numbers)."""
    mixed: NDArray[np.float64] = np.tensordot([*weights.values()], library.of([*weights]).values, 1)
    return mixed


def _ranked(library: Library) -> list[str]:
    """Return the candidates by score, the best first."""
    sign = -1 if library.score.higher else 1
    order = np.argsort([sign * library.scored(values) for values in library.values], kind="stable")
    return [library.names[at] for at in order]


def _mean(library: Library) -> NDArray[np.float64]:
    return np.full(len(library.names), 1 / len(library.names))


def _greedy(library: Library) -> NDArray[np.float64]:
    """Add candidates one at a time, with replacement, each time the one that improves the mean most.

    It begins with the mean of the best N candidates, for the best N, and keeps the best mean on the way.
    Source: Caruana, Niculescu-Mizil, Crew and Ksikes, Ensemble selection from libraries of models, ICML 2004.
    """
    values = library.values
    order = np.argsort([library.loss(one) for one in values], kind="stable")
    means = np.cumsum(values[order], axis=0) / np.arange(1, len(order) + 1)[:, None, None]
    losses = [library.loss(one) for one in means]
    first = int(np.argmin(losses)) + 1
    counts = np.zeros(len(order), dtype=np.int64)
    counts[order[:first]] = 1
    best, least, total = counts.copy(), losses[first - 1], values[order[:first]].sum(0)
    for _ in range(ROUNDS):
        tried = [library.loss((total + one) / (counts.sum() + 1)) for one in values]
        added = int(np.argmin(tried))
        counts[added] += 1
        total = total + values[added]
        if tried[added] < least:
            best, least = counts.copy(), tried[added]
    found: NDArray[np.float64] = best / best.sum()
    return found


METHODS: Final[dict[str, Callable[[Library], NDArray[np.float64]]]] = {"mean": _mean, "greedy": _greedy}
"""The ways to weigh candidates, by name."""
