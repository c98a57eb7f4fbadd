"""`tutti.tune`: a search from a script or a notebook."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from torch.optim import Optimizer

from tutti.errors import BadOption, RunStopped, TuttiError
from tutti.run.api import (
    TrainOptions,
)
from tutti.run.config import TrainConfig
from tutti.strategies import Strategy
from tutti.studies.arguments import Arguments
from tutti.studies.search.objectives import aims_of, with_own
from tutti.studies.search.space import read_space, space_of
from tutti.studies.spelling import TUNE, as_arguments_of, spelled
from tutti.terminal import lasting_output

if TYPE_CHECKING:
    from optuna import Study

    from tutti.studies.search.study import Tuned


@dataclass(frozen=True)
class Found:
    """The result of `tutti.tune`.

    Attributes:
        best: the options of the best trial, such as {"lr": 0.01, "model.hidden": [64]}; with several
            objectives those of the best trial by the first one.
        values: the objectives of that trial, by name.
        config: the configuration that trains it alone.
        trials: all trials, each with "trial" (its number), "state", its objectives and its options.
        importance: the share of each option in how good a trial is; empty: too few trials to tell.
        folder: of the farm, which has all runs.
        study: Optuna's.
    """

    best: dict[str, Any]
    values: dict[str, float]
    config: TrainConfig = field(repr=False)
    trials: list[dict[str, Any]] = field(repr=False)
    importance: dict[str, float]
    folder: Path
    study: Study = field(repr=False)


@as_arguments_of(TUNE)
def tune(
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    data: object = "digits",
    space: Mapping[str, object] | str | Path | None = None,
    *,
    trials: int = 20,
    sampler: str = "tpe",
    pruner: str = "none",
    objective: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = "accuracy",
    folds: int = 1,
    stratified: bool = False,
    optimizer: str | Callable[..., Optimizer] | None = None,
    schedule: str | Callable[..., Any] | None = None,
    strategy: str | Strategy | None = None,
    loss: str | Callable[..., Any] = "auto",
    metrics: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = "auto",
    sampling: object = None,
    augment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    workers: int = 1,
    blocks: int | None = None,
    job_timeout: str | None = None,
    resume: bool = False,
    quiet: bool = False,
    **options: Unpack[TrainOptions],
) -> Found:
    """Search for the best options of a training run, several trials at a time.

    With one block the same seed makes the same trials. Needs Optuna: pip install 'tutti[tune]'.

    Args:
        model: as `tutti.train` takes it.
        data: as `tutti.train` takes it. What is no name or path is read once, and kept in the folder; floats
            as float32.
        space: what is searched: for each option a range as a text, "log:1e-4..1e-1", "0.1..0.9", "16..256",
            or a list of values; an option of a part is called "model.hidden". Or the path of a TOML file.
        trials: how many.
        sampler: tpe, gp, cma-es, random, grid or genetic.
        pruner: what ends trials that are not promising: none, median, asha or hyperband.
        objective: loss or a metric on what is held out, seconds, or parameters; "mine:higher" says which
            values of a metric of your own are better; a function is taken as a metric. A list of several
            looks for all trials that no other is better than.
        folds: of each trial, whose value is the mean over them; 1: the validation part.
        stratified: each fold has the same share of each class.
        optimizer: as for `tutti.train`.
        schedule: as for `tutti.train`.
        strategy: as for `tutti.train`.
        loss: as for `tutti.train`.
        metrics: as for `tutti.train`.
        sampling: as for `tutti.train`.
        augment: as for `tutti.train`.
        workers: the ranks of each run.
        blocks: runs at a time; by default as many as the cores allow, and no more than help.
        job_timeout: after which time a run is given up, such as "10m".
        resume: go on with what is in `out`; trials that have finished are kept.
        quiet: print nothing.
        **options: the other fields of `TrainConfig`, for all trials; `out` is the folder of everything, by
            default farms/DATE-MODEL-DATA.

    Returns:
        The best options, and all trials.

    Raises:
        UserError: an argument is wrong; the message says which and what to do.
        TuttiError: no trial has come to its end.
        RunStopped: it was asked to stop, or its time limit is over; `resume=True` goes on.

    Example:
        >>> found = tutti.tune("mlp", "mnist", {"lr": "log:1e-4..1e-1"}, trials=30, pruner="asha", epochs=9)
        >>> print(found.best)
    """
    if find_spec("optuna") is None:
        raise BadOption("tutti.tune needs Optuna: pip install 'tutti[tune]'")
    from tutti.studies.cross_validation.samples import samples_of
    from tutti.studies.search.display import print_findings, print_question, tune_shown
    from tutti.studies.search.study import Search, begin, look, samples_job

    several = [objective] if isinstance(objective, str) or callable(objective) else objective
    names, metrics = with_own(several, metrics)
    given: dict[str, object] = {"model": model, "loss": loss, "metrics": metrics, "strategy": strategy}
    given |= {"optimizer": optimizer, "schedule": schedule, "sampling": sampling, "augment": augment}
    there = Arguments.of(
        "tune",
        data,
        given,
        options,
        workers=workers,
        blocks=blocks,
        job_timeout=job_timeout,
        resume=resume,
        quiet=quiet,
    )
    search = Search(
        there.config,
        space_of(read_space(space) if isinstance(space, str | Path) else space or {}),
        aims_of(names),
        sampler,
        pruner,
        folds,
        stratified,
        there.objects,
        there.arrays,
    )
    search.check()
    search.count(trials)
    if there.contents is None:
        samples = look(search, there.blocks, trials)
    else:
        samples = samples_of(samples_job(search, there.blocks), there.contents)
    folder = begin(search, samples, there.out, resume)
    with lasting_output(), open(os.devnull, "w") as nothing:
        stream = nothing if quiet else sys.stdout
        print_question(search, trials, stream)
        tuned = tune_shown(search, folder, trials, there.blocks, stream)
        print_findings(tuned, stream)
    if tuned.outcome is not None and tuned.outcome.stopped is not None:
        where = f"resume=True and out={str(folder.path)!r}"
        raise RunStopped(f"the search was stopped: {tuned.outcome.stopped}; go on with it by {where}")
    return _found(tuned)


def _found(tuned: Tuned) -> Found:
    best = tuned.best
    if not best:
        number, why = next(iter(tuned.failed().items()))
        why = spelled(why, TUNE)
        raise TuttiError(
            f"no trial has come to its end: trial {number} failed: {why}; see {tuned.folder.path}"
        )
    first = best[0]
    values = dict(zip(map(str, tuned.search.aims), first.values, strict=True))
    return Found(
        tuned.options(first),
        values,
        tuned.config(first),
        tuned.table(),
        tuned.importance(),
        tuned.folder.path,
        tuned.study,
    )
