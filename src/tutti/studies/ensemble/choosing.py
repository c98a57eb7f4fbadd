"""The choice of an ensemble from a farm, and its score on samples that it was not chosen by.

    fold held out     chosen and fitted on     scored on
    0                 folds 1 2 3 4            fold 0       the ensemble of that choice
    1                 folds 0 2 3 4            fold 1       and the best single candidate of that choice
    ...
    none              all folds                             the ensemble that is kept

Samples of the fold that is held out are left out in every repeat. The gain is the difference of the two
scores of each fold, and its interval that of the corrected t-test over folds, as between candidates: to draw
samples anew would leave out how much models vary with what they are trained on. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tutti.errors import BadData, BadOption, BadRunFolder
from tutti.records.ensemble import Combination
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.output_kinds import Kind
from tutti.records.predictions import Predictions
from tutti.records.run_folder import RunFolder
from tutti.studies.cross_validation.scores import MEASURES, Scores, score_folds
from tutti.studies.cross_validation.significance import Difference, compare
from tutti.studies.cross_validation.study import AMOUNTS, KIND, job_name, predictions_of, ratios_of, splits_of
from tutti.studies.ensemble.combining import combine, fit
from tutti.studies.ensemble.library import Library, library_of

ENSEMBLE: Final = "the ensemble"
BEST: Final = "the best single model"


@dataclass(frozen=True)
class Trained:
    """The candidates of a farm that all folds have been trained of.

    Attributes:
        library: their predictions.
        metric: that they are compared by.
        classes: how many there are; None: the targets are amounts.
        amounts: a single output approaches the class number itself.
        ratios: of each fold, the held-out samples / those that it trains on.
        left_out: the candidates with folds that have not finished.
    """

    library: Library
    metric: str
    classes: int | None
    amounts: bool
    ratios: list[float]
    left_out: list[str]

    def scores(self, folds: Sequence[Predictions]) -> Scores:
        """Score predictions of all folds, or of some samples."""
        flags = self.library.kind is Kind.FLAGS
        return score_folds(folds, self.metric, self.classes, self.amounts, flags)

    def ranked(self, library: Library) -> list[str]:
        """Return the candidates by their score for the samples of a library, the best first."""
        scores = [self.scores([library.predictions(values)]) for values in library.values]
        sign = -1 if MEASURES[scores[0].metric].better == "higher" else 1
        order = np.argsort([sign * one.folds[0] for one in scores], kind="stable")
        return [library.names[at] for at in order]


@dataclass(frozen=True)
class Choice:
    """An ensemble, and what can be told of it.

    Attributes:
        combination: of the candidates that it has.
        kind: of their values.
        best: the best single candidate by all folds.
        scores: of all candidates, and of `ENSEMBLE` and `BEST`, both of which were chosen anew for each fold.
        gain: the difference between these two.
    """

    combination: Combination
    kind: Kind
    best: str
    scores: dict[str, Scores]
    gain: Difference


def read_trained(folder: FarmFolder) -> Trained:
    """Read the predictions of a farm's candidates.

    Raises:
        BadRunFolder: it is the farm of no cross-validation, or a file in it is damaged.
        BadData: no candidate has finished, or what they predict cannot be combined.
    """
    if folder.plan.kind != KIND:
        raise BadRunFolder(
            f"{folder.path} is the farm of a '{folder.plan.kind}', and no cross-validation; give one that "
            "'tutti cv' wrote"
        )
    asked = folder.plan.question
    splits = splits_of(folder, asked)
    found, losses, left_out = dict[str, list[Predictions]](), dict[str, str](), list[str]()
    for name in asked["candidates"]:
        jobs = [job_name(name, number) for number in range(asked["jobs_each"])]
        if any(folder.state(job) is not JobState.FINISHED for job in jobs):
            left_out.append(name)
            continue
        runs = [RunFolder(folder.job(job)) for job in jobs]
        found[name] = [predictions_of(run, split) for run, split in zip(runs, splits, strict=True)]
        losses[name] = str(RunFolder(folder.job(jobs[0])).config().get("loss"))
    if not found:
        raise BadData(
            f"no candidate of {folder.path} has finished all folds, so there is nothing to combine; go on "
            f"with 'tutti cv ... --resume --out {folder.path}'"
        )
    amounts = any(loss in AMOUNTS for loss in losses.values())
    library = library_of(found, losses)
    # What runs have computed themselves nobody has computed of a combination.
    metric = asked["score"] if asked["score"] in MEASURES else "auto"
    # Labels of 0 or 1 may be floats, whose automatic score is that of amounts: an error of logits.
    metric = "accuracy" if metric == "auto" and library.kind is Kind.FLAGS else metric
    return Trained(library, metric, asked["classes"], amounts, ratios_of(splits), left_out)


def choose(trained: Trained, method: str, top: int | None = None) -> Choice:
    """Choose an ensemble, and score it on folds that it was not chosen by.

    Args:
        trained: the candidates.
        method: a name in `METHODS`.
        top: combine so many of the best; None: all.

    Raises:
        BadOption: there are not so many.
        BadData: there is a single fold.
        UnknownName: there is no such method.
    """
    library = trained.library
    if top is not None and not 1 <= top <= len(library.names):
        there = f"{len(library.names)}: {', '.join(library.names)}"
        raise BadOption(f"--top is {top}, and the candidates that have finished are {there}")
    numbers = range(len(trained.ratios))
    chosen = [held_out_values(trained, number, method, top) for number in numbers]
    ours, theirs = zip(*chosen, strict=True)
    both = {ENSEMBLE: trained.scores(ours), BEST: trained.scores(theirs)}
    candidates = {
        name: trained.scores(
            [one.predictions(one.of([name]).values[0]) for one, _ in map(library.fold, numbers)]
        )
        for name in library.names
    }
    found, best = _chosen(trained, library, method, top)
    (gain,) = compare(both, trained.ratios)
    return Choice(found, library.kind, best, {**candidates, **both}, gain)


def held_out_values(
    trained: Trained, fold: int, method: str, top: int | None = None
) -> tuple[Predictions, Predictions]:
    """Predict the samples of a fold by what is chosen without them: an ensemble, and the best candidate.

    Raises:
        BadData: there are no other samples.
    """
    held_out, rest = trained.library.fold(fold)
    if not len(rest.rows):
        raise BadData(
            "an ensemble is scored on samples that it was not chosen by, and a single fold leaves none to "
            "choose it by; cross-validate with two folds or more"
        )
    found, best = _chosen(trained, rest, method, top)
    values = combine(found, held_out.of(found.candidates).values)
    return held_out.predictions(values), held_out.predictions(held_out.of([best]).values[0])


def _chosen(trained: Trained, library: Library, method: str, top: int | None) -> tuple[Combination, str]:
    """Choose by the samples of a library: the combination, and the best single candidate."""
    names = trained.ranked(library)
    return fit(method, library.of(names[:top])), names[0]
