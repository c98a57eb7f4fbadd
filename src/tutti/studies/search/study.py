"""A search on a farm: its question, its jobs, and its result.

FARM/study.journal            Optuna's study: `tutti.studies.search.trials`
FARM/splits.npz               the rows of each fold, if there are folds
FARM/jobs/trial-0007/         the run of a trial, or its runs in fold-0/ and so on
FARM/trials.csv               all trials
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
from numpy.typing import NDArray

from tutti.errors import BadOption, BadRunFolder
from tutti.farm.coordinator import FarmOutcome, Listener
from tutti.farm.jobs import FarmJob
from tutti.farm.work import work_on
from tutti.records.farm_folder import DATA, SPLITS, FarmFolder
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder, folder_name
from tutti.records.splits import write_splits
from tutti.run.config import TrainConfig
from tutti.run.pickled import Pickled
from tutti.studies.crossing import refuse_single_run, with_options
from tutti.studies.farms import FOLDER, Blocks, keep_data, write_table
from tutti.studies.score import AUTO, LOSS, Score, first_score
from tutti.studies.search.jobs import SearchJobs
from tutti.studies.search.methods import GRID, check_methods
from tutti.studies.search.space import Space, space_of
from tutti.studies.search.trials import COMPLETE, FAILED, JOURNAL, PRUNED, Method, Trials, open_study

if TYPE_CHECKING:
    from tutti.studies.samples import Samples  # Imports torch.

KIND: Final = "tune"
"""The kind of the farm."""

TRIALS: Final = "trials.csv"

IN_SPACE: Final = "space."
"""Prefix of the names of searched options in the plan of a farm."""

FEW: Final = 4
"""The least number of different results to estimate importance from."""

EPOCHS: Final = 20
"""The epochs of a run with neither epochs nor steps given."""


@dataclass(frozen=True)
class Search:
    """The question of a search."""

    config: TrainConfig  # shared by all trials; its seed decides all random choices
    space: Space
    scores: Sequence[Score]  # the objectives
    sampler: str = "tpe"  # a name in `SAMPLERS`
    pruner: str = "none"  # a name in `PRUNERS`
    folds: int = 1  # of each trial; 1: the validation part
    stratified: bool = False  # each fold has the same share of each class
    objects: Mapping[str, Pickled] = field(default_factory=dict)  # as in a `Job`
    arrays: Mapping[str, NDArray[Any]] | None = None  # data for the farm to keep, by the keys of an NPZ file

    @property
    def span(self) -> int:
        """The most epochs of a run."""
        searched = "epochs" in self.space.distributions
        return int(max(self.space.ends("epochs"))) if searched else self.config.epochs or EPOCHS

    @property
    def servers(self) -> int:
        """The ranks of a block that are servers in all trials."""
        searched = "servers" in self.space.distributions
        return int(min(self.space.ends("servers"))) if searched else self.config.servers

    def check(self) -> None:
        """Refuse options that do not fit, before the data are read."""
        if self.folds < 1 or (self.stratified and self.folds == 1):
            raise BadOption(f"the number of folds is {self.folds}; give at least 1, or 2 if stratified")
        names = [one.name for one in self.scores]
        if not names or len({*names}) < len(names):
            raise BadOption(f"the objectives are '{','.join(names)}'; give one or several, each once")
        refuse_single_run(self.config)
        by_validation = any(one.by_epoch for one in self.scores)
        if self.folds == 1 and by_validation and self.config.validation == 0:
            raise BadOption("--validation is 0, so trials cannot be compared; give a share, or --folds 3")
        if self.folds > 1 and self.config.validation != TrainConfig.validation:
            raise BadOption("--folds and --validation both hold samples out; give one of them")
        self.space.check(self.config)
        by_epochs = self.config.steps is None and "steps" not in self.space.distributions
        check_methods(self.sampler, self.pruner, self.space, self.scores, by_epochs)

    def decided(self, metrics: Sequence[str]) -> Search:
        """Return the search with "auto" resolved, if the runs compute these metrics."""
        scores = [first_score(metrics) if one.name == AUTO else one for one in self.scores]
        for one in scores:
            if one.by_epoch and one.name not in (LOSS, *metrics):
                raise BadOption(
                    f"--objective is {one.name}, but the runs have {', '.join((LOSS, *metrics))}; choose one "
                    "of these, or name it in --metrics"
                )
        return replace(self, scores=scores)

    def record(self) -> Json:
        """Return the question as JSON values; a resumed search must have an equal one."""
        left_out = ("out", "workers", "threads", "time_limit")
        config = {name: value for name, value in self.config.as_json().items() if name not in left_out}
        return {
            **config,
            **{IN_SPACE + name: one for name, one in self.space.written.items()},
            "objective": [str(one) for one in self.scores],
            "sampler": self.sampler,
            "pruner": self.pruner,
            "folds": self.folds,
            "stratified": self.stratified,
        }

    @classmethod
    def from_json(cls, values: Json) -> Search:
        """Return the question that `record` gave."""
        known = {one.name for one in fields(TrainConfig)}
        config = TrainConfig.from_json({name: value for name, value in values.items() if name in known})
        space = {
            name.removeprefix(IN_SPACE): one for name, one in values.items() if name.startswith(IN_SPACE)
        }
        own = {name: values[name] for name in ("sampler", "pruner", "folds", "stratified")}
        return cls(config, space_of(space), [*map(Score.read, values["objective"])], **own)

    def count(self, trials: int) -> int:
        """Return the number of trials, at most `trials`: a grid is finite."""
        if trials < 1:
            raise BadOption(f"the number of trials is {trials}; the smallest possible is 1")
        return min(trials, len(self.space.points())) if self.sampler == GRID else trials

    def config_of(self, options: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a trial with these options."""
        return with_options(self.config.as_json(), options)

    def jobs(self, splits: Path, number: int, options: Mapping[str, Any]) -> list[FarmJob]:
        """Return the jobs of a trial."""
        config, objects, prunable = self.config_of(options), dict(self.objects), self.pruner != "none"
        configs = [config]
        if self.folds > 1:
            # The splits leave the test part out.
            config = replace(config, validation=TrainConfig.validation, test=0.0)
            configs = [
                replace(config, split=f"{splits}:{fold}", seed=config.seed + fold)
                for fold in range(self.folds)
            ]
        return [
            FarmJob(name, one, objects=objects, prunable=prunable)
            for name, one in zip(self.job_names(number), configs, strict=True)
        ]

    def job_names(self, number: int) -> list[str]:
        """Return the names of the jobs of a trial."""
        trial = f"trial-{number:04}"
        return [trial] if self.folds == 1 else [f"{trial}/fold-{fold}" for fold in range(self.folds)]

    def at_ends(self) -> list[FarmJob]:
        """Return runs with the values at the ends of the space, for checks."""
        return [
            FarmJob("", self.config_of({name: value}), dict(self.objects))
            for name in self.space.distributions
            for value in self.space.ends(name)
        ]

    def begin(self, samples: Samples, out: str | Path | None, resume: bool = False) -> FarmFolder:
        """Make the folder of the farm with its splits, or continue in an earlier one."""
        question = {**self.record(), "fingerprint": samples.fingerprint}
        path = out or FOLDER / folder_name(self.config.model, samples.name)
        folder = FarmFolder.begin(path, KIND, question, resume=resume)
        if self.folds > 1 and not folder.splits.is_file():
            # Imports scikit-learn, for a second.
            from tutti.studies.cross_validation.splits import make_splits, splitter_of

            grouped = samples.groups is not None
            splitter = splitter_of(self.folds, 1, self.config.seed, self.stratified, grouped)
            splits = make_splits(splitter, samples.targets, samples.groups, samples.rest)
            write_splits(folder.splits, splits, samples.fingerprint, self.config.seed)
        keep_data(folder, self.arrays)
        return folder


def _in_folder(search: Search, folder: FarmFolder) -> Search:
    """Return the search with the data that its farm keeps, if there are any."""
    data = folder.path.absolute() / DATA
    return replace(search, config=replace(search.config, data=str(data))) if data.is_file() else search


@dataclass(frozen=True)
class Tuned:
    """The result of `tutti.tune`.

    Attributes:
        search: the question.
        folder: of the farm, with all runs.
        study: Optuna's.
        outcome: the end of the work; None: the result was read from its folder.
    """

    search: Search = field(repr=False)
    folder: Path
    study: optuna.Study = field(repr=False)
    outcome: FarmOutcome | None = field(default=None, repr=False)

    @property
    def best(self) -> dict[str, Any]:
        """The options of the trial that is best by the first objective, such as {"model.hidden": [64]}."""
        return self.search.space.options(self.front[0].params)

    @property
    def values(self) -> dict[str, float]:
        """The objectives of the best trial, by name."""
        return dict(zip(map(str, self.search.scores), self.front[0].values, strict=True))

    @property
    def config(self) -> TrainConfig:
        """The configuration that trains the best trial alone."""
        return self.search.config_of(self.best)

    @property
    def trials(self) -> list[dict[str, Any]]:
        """All trials, each with "trial" (the number), "state", the objectives and the options."""
        scores = [str(one) for one in self.search.scores]
        options = [(trial, self.search.space.options(trial.params)) for trial in self._trials]
        return [
            {
                "trial": trial.number,
                "state": trial.state.name.lower(),
                **dict(zip(scores, trial.values or [None] * len(scores), strict=True)),
                **{name: chosen[name] for name in self.search.space.distributions},
            }
            for trial, chosen in options
        ]

    @property
    def importance(self) -> dict[str, float]:
        """The importance of each option for the objective, 1 in all; empty with too few trials."""
        values = {tuple(one.values) for one in self._trials if one.state is COMPLETE}
        return dict(optuna.importance.get_param_importances(self.study)) if len(values) >= FEW else {}

    @property
    def front(self) -> list[optuna.trial.FrozenTrial]:
        """The best trial; with several objectives the Pareto front, in the order of the first one."""
        if not any(trial.state is COMPLETE for trial in self._trials):
            return []
        if len(self.search.scores) == 1:
            return [self.study.best_trial]
        higher = self.search.scores[0].higher
        return sorted(self.study.best_trials, key=lambda one: one.values[0], reverse=higher)

    @property
    def failed(self) -> dict[int, str]:
        """The reasons why trials failed, by number."""
        reasons = {}
        for number in (one.number for one in self._trials if one.state is FAILED):
            runs = [RunFolder(FarmFolder(self.folder).job(job)) for job in self.search.job_names(number)]
            errors = (error for run in runs if (error := run.error()))
            reasons[number] = next(errors, "its objective is not finite").strip().splitlines()[-1]
        return reasons

    @property
    def epochs(self) -> tuple[int, int]:
        """The number of trained epochs, and their number without pruning."""
        trials = [one for one in self._trials if one.state in (COMPLETE, PRUNED)]
        whole = self.search.span * self.search.folds
        trained = [one.last_step or 0 if one.state is PRUNED else whole for one in trials]
        return sum(trained), whole * len(trials)

    @property
    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def write_table(self) -> Path:
        """Write all trials as CSV; return the path."""
        rows, path = self.trials, self.folder / TRIALS
        write_table(path, [[*(rows[0] if rows else ["trial"])], *([*row.values()] for row in rows)])
        return path


def tune(
    search: Search, folder: FarmFolder, trials: int, blocks: Blocks, listener: Listener | None = None
) -> Tuned:
    """Work on the farm until it has `trials` trials."""
    search, prunes, count = _in_folder(search, folder), search.pruner != "none", search.count(trials)
    study = open_study(folder.path, search.scores)
    method = Method(search.sampler, search.pruner, search.config.seed, search.span * search.folds)
    source = SearchJobs(
        Trials(folder.path, study, search.space, method),
        count,
        partial(search.jobs, folder.path.absolute() / SPLITS),
        search.scores,
        prunes,
        search.span,
        lambda job: RunFolder(folder.job(job)).lines(EpochRecord).records,
    )
    # With a pruner the folds of a trial take turns.
    limits = {**vars(blocks), "jobs": count * (1 if prunes else search.folds), "servers": search.servers}
    outcome = work_on(folder, source, **limits, listener=listener)
    return Tuned(search, folder.path, study, outcome)


def read_search(folder: FarmFolder) -> Tuned:
    """Read a search from its folder."""
    if folder.plan.kind != KIND:
        raise BadRunFolder(f"{folder.path} is no search; give a folder that 'tutti tune' wrote")
    if not (folder.path / JOURNAL).is_file():
        raise BadRunFolder(f"{folder.path} has no {JOURNAL} yet")
    search = _in_folder(Search.from_json(folder.plan.question), folder)
    return Tuned(search, folder.path, open_study(folder.path, search.scores))
