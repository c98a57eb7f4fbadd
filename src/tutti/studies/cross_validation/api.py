"""`tutti.cross_validate`: cross-validation from a script or a notebook."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike
from torch import nn
from torch.optim import Optimizer

from tutti.errors import RunStopped, TuttiError, UnknownName
from tutti.records.farm_folder import FarmFolder
from tutti.records.predictions import Predictions
from tutti.records.run_folder import PREDICTIONS
from tutti.run.api import (
    TrainOptions,
)
from tutti.run.config import OBJECT
from tutti.run.pickled_arguments import by_name
from tutti.strategies import Strategy
from tutti.studies.arguments import Arguments
from tutti.studies.cross_validation.asked_score import asked_score
from tutti.studies.cross_validation.candidates import (
    NONE,
    Choice,
    choices_of,
    contenders,
    plain,
    refuse_alike,
    refuse_own_folds,
)
from tutti.studies.cross_validation.display import print_findings, print_scores, train_shown
from tutti.studies.cross_validation.samples import samples_of
from tutti.studies.cross_validation.scores import Scores, out_of_fold
from tutti.studies.cross_validation.significance import Difference
from tutti.studies.cross_validation.splits import splitter_of
from tutti.studies.cross_validation.study import (
    CrossValidation,
    Findings,
    begin,
    best_first,
    fewest_servers,
    findings_of,
    job_name,
    plan_with,
    samples_job,
    without_groups,
    write_findings,
)
from tutti.studies.spelling import CV, as_arguments_of, spelled
from tutti.terminal import lasting_output

Model = str | nn.Module | Callable[..., nn.Module]
Schedule = str | Callable[..., Any] | None


@dataclass(frozen=True)
class CrossValidated:
    """The result of `tutti.cross_validate`; printed, it is the table of scores with the comparison in words.

    Attributes:
        scores: of each candidate that has any, by name, such as "lenet/cosine": those of its folds, their
            mean and deviation, the accuracy of each class, and the confusion of classes.
        comparison: of each two candidates, with what can be told in words: `sentence`.
        failed: the jobs that have failed, with why.
        folder: of the farm, which has all runs and the tables.
    """

    scores: dict[str, Scores]
    comparison: list[Difference] = field(repr=False)
    failed: dict[str, str]
    folder: Path
    _findings: Findings = field(repr=False)

    @property
    def best(self) -> str:
        """The candidate with the best mean, of those with a score of each fold if there are any.

        The comparison says whether that tells anything.
        """
        return best_first(self._findings)[0]

    def predictions(self, name: str) -> Predictions:
        """Return the predictions of a candidate for all samples that were held out, in their order.

        With repeats there is one for each time that a sample was held out.

        Args:
            name: of the candidate.

        Raises:
            UnknownName: it has none.
        """
        if name not in self.scores:
            raise UnknownName("candidate", name, self.scores)
        folder = FarmFolder.open(self.folder)
        jobs = [folder.job(job_name(name, fold)) for fold in range(len(self.scores[name].folds))]
        found = [Predictions.read(job / PREDICTIONS) for job in jobs if (job / PREDICTIONS).is_file()]
        return out_of_fold(found)

    def __str__(self) -> str:
        text = StringIO()
        print_scores(self._findings, text)
        return text.getvalue().rstrip()


@as_arguments_of(CV)
def cross_validate(
    models: Model | Sequence[Model] | Mapping[str, Model] = "cnn",
    data: object = "digits",
    *,
    cv: object = 5,
    schedules: Schedule | Sequence[Schedule] | Mapping[str, Schedule] = None,
    groups: ArrayLike | str | None = None,
    score: str | Callable[..., Any] = "auto",
    sweep: Mapping[str, Sequence[object]] | None = None,
    optimizer: str | Callable[..., Optimizer] | None = None,
    strategy: str | Strategy | None = None,
    workers: int = 1,
    blocks: int | None = None,
    loss: str | Callable[..., Any] = "auto",
    metrics: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = "auto",
    sampling: object = None,
    augment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    job_timeout: str | None = None,
    resume: bool = False,
    quiet: bool = False,
    **options: Unpack[TrainOptions],
) -> CrossValidated:
    """Train models with schedules on the same folds, several runs at a time, and compare them.

    Each run is an ordinary one, with a folder of its own. A run that fails does so alone. A script needs no
    guard such as `if __name__ == "__main__"`, and functions and classes of a notebook can be used.

    Args:
        models: one or several, each as `tutti.train` takes it; a dict gives them names. A module's weights
            are where each fold begins.
        data: as `tutti.train` takes it, floats as there. What is no name or path is read once, and kept in
            the folder.
        cv: how many folds; a splitter of `sklearn.model_selection` or one like it; or pairs of (train, test).
        schedules: one or several, each as `tutti.train` takes it, "none" or None; a dict gives them names.
        groups: the group of each sample: samples of one group are never in both parts. Of data in files also
            the name of a column, which is no input then, or of an array.
        score: the figure that candidates are compared by: accuracy, balanced_accuracy, f1, precision, recall,
            auc, average_precision, top5, mae, mse, rmse, r2, loss, or what `metrics` takes: a name or a
            function. "hits:lower" says which values of it are better, where its name does not. "auto" is
            accuracy for classes and labels of 0 or 1, mae for amounts.
        sweep: further options with values that are crossed in, such as {"lr": [0.1, 0.01]}.
        optimizer: as for `tutti.train`.
        strategy: as for `tutti.train`.
        workers: the ranks of each run.
        blocks: runs at a time; by default as many as the cores allow, and no more than help.
        loss: as for `tutti.train`.
        metrics: as for `tutti.train`.
        sampling: as for `tutti.train`: a weight for each sample of the training part, whatever the fold.
        augment: as for `tutti.train`.
        job_timeout: after which time a run is given up, such as "10m".
        resume: go on with what is in `out`; runs that have finished are kept.
        quiet: print nothing.
        **options: the other fields of `TrainConfig`, for all candidates; `out` is the folder of everything,
            by default farms/DATE-MODELS-DATA.

    Returns:
        The scores, the comparison, and where all is.

    Raises:
        UserError: an argument is wrong; the message says which and what to do.
        TuttiError: no fold of any candidate has come to its end.
        RunStopped: it was asked to stop, or its time limit is over; `resume=True` goes on.

    Example:
        >>> result = tutti.cross_validate(["lenet", "mlp"], "mnist", cv=5, epochs=3)
        >>> print(result)
    """
    asked = asked_score(score, "--score", metrics)
    given: dict[str, object] = {"loss": loss, "metrics": asked.among(metrics), "strategy": strategy}
    given |= {"optimizer": optimizer, "sampling": sampling, "augment": augment}
    there = Arguments.of(
        "cross_validate",
        data,
        given,
        options,
        workers=workers,
        blocks=blocks,
        job_timeout=job_timeout,
        resume=resume,
        quiet=quiet,
    )
    refuse_own_folds(there.config)
    config = without_groups(there.config, groups if isinstance(groups, str) else None)
    chosen = _choices("model", models), _choices("schedule", schedules)
    candidates = contenders(config, *chosen, sweep or {}, there.objects)
    jobs = max(0, cv) * len(candidates) if isinstance(cv, int) else None
    there.blocks.prepare(jobs, fewest_servers(candidates))
    if isinstance(cv, int):
        said: dict[str, Any] = {"folds": cv}
        cv = splitter_of(cv, seed=config.seed, grouped=groups is not None)
    else:
        said = {"cv": type(cv).__name__}
    known = groups if groups is None or isinstance(groups, str) else np.asarray(groups)
    question = CrossValidation(config, candidates, cv, said, known, asked.name, there.arrays)
    plan = plan_with(question, samples_of(samples_job(question, there.blocks), there.contents))
    folder = begin(plan, there.out or plan.usual_folder(), resume)
    # The folder has the splits now.
    del plan
    with lasting_output(), open(os.devnull, "w") as nothing:
        stream = nothing if quiet else sys.stdout
        outcome = train_shown(question, folder, there.blocks, stream)
        found = findings_of(folder)
        write_findings(folder, found)
        print_findings(found, folder, outcome, stream)
    if outcome.stopped is not None:
        where = f"resume=True and out={str(folder.path)!r}"
        raise RunStopped(f"the cross-validation was stopped: {outcome.stopped}; go on with it by {where}")
    if not found.scores:
        job, why = next(iter(found.failed.items()))
        why = spelled(why, CV)
        raise TuttiError(f"no fold has come to its end: {job} failed: {why}; see {folder.job(job)}")
    return CrossValidated(found.scores, found.differences, found.failed, folder.path, found)


def _choices(kind: str, given: object) -> list[Choice]:
    """Return the models or schedules, which are called by their names, classes or functions."""
    named: list[tuple[str | None, object]]
    if isinstance(given, Mapping):
        named = list(given.items())
    elif isinstance(given, list | tuple):
        named = [(None, one) for one in given]
    else:
        named = [(None, given)]
    named = [(name, NONE if one is None else one) for name, one in named]
    if all(name is None and isinstance(one, str) for name, one in named):
        return choices_of(kind, [cast("str", one) for _, one in named])
    found = []
    for name, one in named:
        if isinstance(one, str):
            (choice,) = choices_of(kind, [one])
        else:
            values, objects = by_name({kind: one})
            short = values[kind].removeprefix(OBJECT).rpartition(":")[2]
            choice = Choice(plain(short.rpartition(".")[2]), values, objects)
        found.append(choice if name is None else replace(choice, name=plain(str(name))))
    given_as = [str(one if name is None else name) for name, one in named]
    refuse_alike(kind, given_as, [choice.name for choice in found])
    return found
