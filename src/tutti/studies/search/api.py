"""`tutti.tune`: a search from a script or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from tutti.errors import TuttiError
from tutti.load_object import require_packages
from tutti.run.arguments import as_arguments
from tutti.studies.arguments import Arguments, StudyOptions, refuse_stopped
from tutti.studies.samples import look_at
from tutti.studies.score import scores_of

if TYPE_CHECKING:
    from tutti.studies.search.study import Tuned


@as_arguments()
def tune(
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    data: object = "digits",
    space: Mapping[str, object] | str | Path | None = None,
    *,
    trials: int = 20,
    sampler: str = "tpe",
    pruner: str = "none",
    objective: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = "auto",
    folds: int = 1,
    stratified: bool = False,
    schedule: str | Callable[..., Any] | None = None,
    **options: Unpack[StudyOptions],
) -> Tuned:
    """Search for the best options of a training run, several trials at a time.

    With one block the same seed makes the same trials. Needs Optuna: pip install 'tutti[tune]'.

    Args:
        model: as for `tutti.train`.
        data: as for `tutti.train`; floats become float32. Data given as an object are read once, and kept in
            the folder.
        space: the options to search: for each a range as a text, "log:1e-4..1e-1", "0.1..0.9", "16..256",
            or a list of values; an option of a part has a name such as "model.hidden". Or the path of a TOML
            file.
        trials: the number of trials.
        sampler: tpe, gp, cma-es, random, grid or genetic.
        pruner: ends unpromising trials: none, median, asha or hyperband.
        objective: loss or a metric on the held-out samples, seconds, or parameters; "mine:higher" says which
            values of your own metric are better; a function is a metric. With several objectives the result
            has all trials that no other trial beats in all of them. "auto" is the first metric.
        folds: of each trial; the objective is the mean over them. 1: the validation part.
        stratified: each fold has the same share of each class.
        schedule: as for `tutti.train`.
        **options: strategy, optimizer, loss, metrics, sampling and augment, as for `tutti.train`; block, the
            ranks of each run; blocks, the runs at a time (by default as many as the cores allow);
            job_timeout, which ends a run, such as "10m"; out, the folder of all runs and results (by default
            farms/DATE-MODEL-DATA); resume, to continue in `out`; quiet, to print nothing; and the other
            fields of `TrainConfig`, for all trials, such as epochs=5.

    Returns:
        The best options, and all trials.

    Raises:
        UserError: an argument is wrong; the message says which and what to do.
        TuttiError: no trial has finished.
        RunStopped: a stop was requested, or the time limit is over; `resume=True` continues.

    Example:
        >>> found = tutti.tune("mlp", "mnist", {"lr": "log:1e-4..1e-1"}, trials=30, pruner="asha", epochs=9)
        >>> print(found.best)
    """
    require_packages("tutti.tune needs", ["optuna"], "tune")
    from tutti.studies.search.display import tune_shown
    from tutti.studies.search.space import read_space, space_of
    from tutti.studies.search.study import Search

    several = [objective] if isinstance(objective, str) or callable(objective) else objective
    scores, options["metrics"] = scores_of(several, options.get("metrics", "auto"), "objective")
    given = Arguments.of("tune", data, options, model=model, schedule=schedule)
    search = Search(
        given.config,
        space_of(read_space(space) if isinstance(space, str | Path) else space or {}),
        scores,
        sampler,
        pruner,
        folds,
        stratified,
        given.objects,
        given.arrays,
    )
    search.check()
    search.count(trials)
    samples = look_at(search.at_ends(), given.blocks.block, given.contents)
    search = search.decided(samples.metrics)
    folder = search.begin(samples, given.out, given.resume)
    with given.stream() as stream:
        tuned = tune_shown(search, folder, trials, given.blocks, stream)
    refuse_stopped("search", tuned.outcome, folder.path)
    if not tuned.front:
        number, why = next(iter(tuned.failed.items()))
        raise TuttiError(f"no trial has finished: trial {number} failed: {why}; see {folder.path}")
    return tuned
