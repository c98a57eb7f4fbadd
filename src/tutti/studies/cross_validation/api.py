"""`tutti.cross_validate`: cross-validation from a script or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from tutti.errors import TuttiError
from tutti.farm.jobs import FarmJob
from tutti.run.arguments import as_arguments
from tutti.studies.arguments import Arguments, StudyOptions, refuse_stopped
from tutti.studies.cross_validation.candidates import alternatives, candidates_of
from tutti.studies.cross_validation.display import train_shown
from tutti.studies.cross_validation.result import CrossValidated
from tutti.studies.cross_validation.splits import splitter_of
from tutti.studies.cross_validation.study import CrossValidation, without_groups
from tutti.studies.crossing import refuse_single_run
from tutti.studies.samples import look_at
from tutti.studies.score import AUTO, score_of

Model = str | nn.Module | Callable[..., nn.Module]
Schedule = str | Callable[..., Any] | None


@as_arguments()
def cross_validate(
    models: Model | Sequence[Model] | Mapping[str, Model] = "cnn",
    data: object = "digits",
    *,
    cv: object = 5,
    schedules: Schedule | Sequence[Schedule] | Mapping[str, Schedule] = None,
    groups: ArrayLike | str | None = None,
    score: str | Callable[..., Any] = AUTO,
    sweep: Mapping[str, Sequence[object]] | None = None,
    **options: Unpack[StudyOptions],
) -> CrossValidated:
    """Train models with schedules on the same folds, several runs at a time, and compare them.

    Each run has its own run folder. If a run fails, the others go on. A script needs no guard such as
    `if __name__ == "__main__"`, and functions and classes of a notebook can be used.

    Args:
        models: one or several, each as for `tutti.train`; a dict names them. Each fold starts from the
            current weights of a module.
        data: as for `tutti.train`, including floats. Data given as an object are read once, and kept in the
            folder.
        cv: the number of folds, a splitter of `sklearn.model_selection` or your own, or pairs of (train,
            test).
        schedules: one or several, each as for `tutti.train`, or "none"; a dict names them. None is the
            default of the model, if it has one.
        groups: the group of each sample: samples of one group are never in both parts. For data in files also
            the name of an array, or of a column, which is then no input.
        score: the figure to compare candidates by, on the held-out samples: loss, or a metric as for
            `metrics`. "hits:lower" says which values are better, if the name does not. "auto" is the first of
            `metrics`, or else the loss.
        sweep: further options with values to cross, such as {"lr": [0.1, 0.01]}.
        **options: strategy, optimizer, loss, metrics, sampling and augment, as for `tutti.train`; block, the
            ranks of each run; blocks, the runs at a time (by default as many as the cores allow);
            job_timeout, which ends a run, such as "10m"; out, the folder of all runs and results (by default
            farms/DATE-MODELS-DATA); resume, to continue in `out`; quiet, to print nothing; and the other
            fields of `TrainConfig`, for all candidates, such as epochs=5.

    Returns:
        The scores, the comparison, and the folder.

    Raises:
        UserError: an argument is wrong; the message says which and what to do.
        TuttiError: no fold has finished.
        RunStopped: a stop was requested, or the time limit is over; `resume=True` continues.

    Example:
        >>> result = tutti.cross_validate(["lenet", "mlp"], "mnist", cv=5, epochs=3)
        >>> print(result)
    """
    if score != AUTO:
        found, options["metrics"] = score_of(score, options.get("metrics", "auto"), "score")
        score = str(found)
    given = Arguments.of("cross_validate", data, options)
    refuse_single_run(given.config, "validation", "test")
    config, blocks = without_groups(given.config, groups), given.blocks
    chosen = alternatives("model", _named(models)), alternatives("schedule", _named(schedules))
    candidates = candidates_of(FarmJob("", config, given.objects), *chosen, sweep or {})
    blocks.prepare()
    described: dict[str, Any] = {"cv": type(cv).__name__}
    if isinstance(cv, int | np.integer):
        described = {"folds": int(cv)}
        cv = splitter_of(int(cv), seed=config.seed, grouped=groups is not None)
    known = groups if groups is None or isinstance(groups, str) else np.asarray(groups)
    question = CrossValidation(candidates, cv, described, known, score, given.arrays)
    samples = look_at([*candidates.values()], blocks.block, given.contents)
    folder = question.begin(samples, question.splits(samples), given.out, given.resume)
    with given.stream() as stream:
        outcome, result = train_shown(question, folder, blocks, stream)
    refuse_stopped("cross-validation", outcome, folder.path)
    if not result.scores:
        job, why = next(iter(result.failed.items()))
        raise TuttiError(f"no fold has finished: {job} failed: {why}; see {folder.job(job)}")
    return result


def _named(given: object) -> list[tuple[str | None, object]]:
    """Return models or schedules with their given names."""
    if isinstance(given, Mapping):
        return [(str(name), one) for name, one in given.items()]
    return [(None, one) for one in (given if isinstance(given, list | tuple) else [given])]
