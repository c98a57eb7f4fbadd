"""A search on a farm: from the question to trials and jobs, and back to what is best.

FARM/study.journal            Optuna's study: `tutti.studies.search.trials`
FARM/splits.npz               the rows of each fold, with folds
FARM/jobs/trial-0007/         the run of a trial; with folds, fold-0/ and so on in it
FARM/trials.csv               all trials
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import optuna
from numpy.typing import NDArray

from tutti.errors import BadOption, BadRunFolder
from tutti.farm.block_placement import place_blocks
from tutti.farm.coordinator import FarmOutcome, Listener
from tutti.farm.jobs import FarmJob
from tutti.farm.work import work_on
from tutti.records.farm_folder import DATA, SPLITS, FarmFolder
from tutti.records.files import refusing, replace_file
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder, folder_name
from tutti.records.splits import write_splits
from tutti.run.config import TrainConfig
from tutti.run.pickled import Pickled
from tutti.run.start import check_files
from tutti.run.train_job import TrainJob
from tutti.studies.blocks import Blocks
from tutti.studies.cross_validation.samples_job import Samples, SamplesJob, look_at
from tutti.studies.cross_validation.splits import Splitter, make_splits, splitter_of
from tutti.studies.cross_validation.study import keep_data, numbers_of
from tutti.studies.crossing import refuse_single_run, with_options
from tutti.studies.search.jobs import SearchJobs
from tutti.studies.search.methods import GRID, check_pruner, check_sampler
from tutti.studies.search.objectives import Aim, aims_of
from tutti.studies.search.space import Range, Space, space_of
from tutti.studies.search.trials import (
    COMPLETE,
    JOURNAL,
    PRUNED,
    Method,
    Trials,
    distributions_of,
    open_study,
    options_of,
    points_of,
)

KIND: Final = "tune"
"""The kind of a farm."""

FOLDER: Final = Path("farms")
"""The folder of farms without a path of their own."""

TRIALS: Final = "trials.csv"

IN_SPACE: Final = "space."
"""Begins the name of an option that is searched, in the plan of a farm."""

EPOCHS: Final = 20
"""The epochs of a run that is given neither epochs nor steps."""


@dataclass(frozen=True)
class Search:
    """The question of a search.

    Attributes:
        config: what all trials have in common; its seed decides all that is random.
        space: what is tried.
        aims: what is to be high or low.
        sampler: a name in `SAMPLERS`.
        pruner: a name in `PRUNERS`.
        folds: of each trial; 1: none, but the validation part.
        stratified: each fold has the same share of each class.
        objects: what was given as Python objects for all, as in a `Job`.
        arrays: the data, where they are given as such, by the keys of an NPZ file: the farm keeps them.
    """

    config: TrainConfig
    space: Space
    aims: Sequence[Aim]
    sampler: str = "tpe"
    pruner: str = "none"
    folds: int = 1
    stratified: bool = False
    objects: Mapping[str, Pickled] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] | None = None

    @property
    def span(self) -> int:
        """The epochs of a run, the most that a trial can have."""
        searched = self.space.dimensions.get("epochs")
        if searched is None:
            return self.config.epochs or EPOCHS
        return int(searched.high if isinstance(searched, Range) else max(searched.ends()))

    @property
    def servers(self) -> int:
        """The ranks of a block that train in no trial."""
        searched = self.space.dimensions.get("servers")
        if searched is None:
            return self.config.servers
        return int(searched.low if isinstance(searched, Range) else min(searched.ends()))

    def check(self) -> None:
        """Refuse what cannot be searched, as far as that can be seen without the data.

        Raises:
            UserError: the message says what to change.
        """
        if self.folds < 1:
            raise BadOption(f"--folds is {self.folds}; the smallest possible is 1, which is none")
        if self.stratified and self.folds == 1:
            raise BadOption("--stratified is for folds; give --folds 3 or the like, or leave it out")
        refuse_single_run(self.config)
        by_validation = any(aim.by_epoch for aim in self.aims)
        if self.folds == 1 and by_validation and self.config.validation == 0:
            raise BadOption("--validation is 0, so trials cannot be compared; give a share, or --folds 3")
        if self.folds > 1 and self.config.validation != TrainConfig.validation:
            raise BadOption("--folds says what is held out, and so does --validation; give one of them")
        self.space.check(self.config)
        check_sampler(self.sampler, distributions_of(self.space), len(self.aims))
        by_epochs = self.config.steps is None and "steps" not in self.space.dimensions
        check_pruner(self.pruner, self.aims, by_epochs)

    def record(self) -> Json:
        """Return the question as JSON values: who resumes it must ask the same."""
        left_out = ("out", "workers", "threads", "time_limit")
        config = {name: value for name, value in self.config.as_json().items() if name not in left_out}
        space = {IN_SPACE + name: one for name, one in self.space.as_json().items()}
        return {
            **config,
            **space,
            "objective": [str(aim) for aim in self.aims],
            "sampler": self.sampler,
            "pruner": self.pruner,
            "folds": self.folds,
            "stratified": self.stratified,
        }

    @classmethod
    def from_json(cls, values: Json) -> Search:
        """The question that `record` gave.

        Raises:
            UserError: a value cannot be used.
        """
        known = {one.name for one in fields(TrainConfig)}
        config = TrainConfig.from_json({name: value for name, value in values.items() if name in known})
        space = {
            name.removeprefix(IN_SPACE): one for name, one in values.items() if name.startswith(IN_SPACE)
        }
        own = {name: values[name] for name in ("sampler", "pruner", "folds", "stratified")}
        return cls(config, space_of(space), aims_of(values["objective"]), **own)

    def count(self, trials: int) -> int:
        """Return how many trials there are, of so many at most: a grid comes to its end.

        Raises:
            BadOption: there are none.
        """
        if trials < 1:
            raise BadOption(f"--trials is {trials}; the smallest possible is 1")
        return min(trials, len(points_of(self.space))) if self.sampler == GRID else trials

    def at_a_time(self, trials: int) -> int:
        """Return how many jobs there may be at a time, of so many trials."""
        return self.count(trials) * (self.folds if self.pruner == "none" else 1)

    def config_of(self, options: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a trial with these options.

        Raises:
            UserError: they do not go together.
        """
        return with_options(self.config.as_json(), options)

    def jobs(self, splits: Path, number: int, options: Mapping[str, Any]) -> list[FarmJob]:
        """Return the jobs of a trial.

        Args:
            splits: the file of splits.
            number: of the trial.
            options: of the trial.
        """
        config, objects, prunable = self.config_of(options), dict(self.objects), self.pruner != "none"
        configs = [config]
        if self.folds > 1:
            # What is held out is in the splits.
            config = replace(config, validation=TrainConfig.validation)
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

    def splitter(self) -> Splitter:
        """Return what divides the samples into folds."""
        return splitter_of(self.folds, 1, self.config.seed, self.stratified)


def look(search: Search, blocks: Blocks, trials: int) -> Samples:
    """Look at the data, and check the values at the ends of the space, in a process that has torch.

    Args:
        search: the question.
        blocks: where trials are to run.
        trials: how many there are to be.

    Raises:
        UserError: the data cannot be read, or a value cannot be used.
    """
    jobs = search.at_a_time(trials)
    placement, _ = place_blocks(blocks.block, blocks.blocks, blocks.threads, jobs, search.servers)
    return look_at(samples_job(search, blocks), placement.threads or 1)


def samples_job(search: Search, blocks: Blocks) -> SamplesJob:
    """Return the job of looking at the data, and checking the values at the ends of the space.

    Raises:
        BadOption: a Python file that the search names is not there.
    """
    # Arrays are no file yet that could be looked for.
    objects = dict(search.objects) | ({} if search.arrays is None else {"data": Pickled(b"")})
    workers = str(max(1, blocks.block - search.config.servers))
    found = {}
    for name, dimension in search.space.dimensions.items():
        for value in dimension.ends():
            config = replace(search.config_of({name: value}), workers=workers)
            check_files(config)
            found[repr(config)] = TrainJob(config, objects=objects)
    return SamplesJob(search.config, tuple(found.values()), blocks.block, objects=objects)


def begin(search: Search, samples: Samples, out: str | Path | None, resume: bool = False) -> FarmFolder:
    """Make the folder of the farm, with the splits of its folds; or take up that of an earlier one.

    Raises:
        BadOption: the farm that is there has another question, or the samples cannot be split.
        BadRunFolder: something else is there, or the folder cannot be written.
    """
    question = {**search.record(), **numbers_of(search.objects), "fingerprint": samples.fingerprint}
    path = out or FOLDER / folder_name(search.config.model, samples.name)
    folder = FarmFolder.begin(path, KIND, question, resume=resume)
    if search.folds > 1 and not folder.splits.is_file():
        splits = make_splits(search.splitter(), samples.targets, labels=samples.labels)
        write_splits(folder.splits, splits, samples.fingerprint, search.config.seed)
    if search.arrays is not None:
        keep_data(folder, search.arrays)
    return folder


def _in_folder(search: Search, folder: FarmFolder) -> Search:
    """Return a search whose data are where its farm keeps them, if it does."""
    data = folder.path.absolute() / DATA
    return replace(search, config=replace(search.config, data=str(data))) if data.is_file() else search


@dataclass(frozen=True)
class Tuned:
    """A search, as far as it has come.

    Attributes:
        search: its question.
        folder: of the farm.
        study: Optuna's.
        outcome: how the work on it has ended; None: it is read from its folder.
    """

    search: Search
    folder: FarmFolder
    study: optuna.Study
    outcome: FarmOutcome | None = None

    @property
    def best(self) -> list[optuna.trial.FrozenTrial]:
        """The best trial; none if no trial has come to its end.

        With several objectives all that no other one is better than, the best by the first of these first.
        """
        if not any(trial.state is COMPLETE for trial in self.study.get_trials(deepcopy=False)):
            return []
        if len(self.search.aims) == 1:
            return [self.study.best_trial]
        higher = self.search.aims[0].higher
        return sorted(self.study.best_trials, key=lambda one: one.values[0], reverse=higher)

    def options(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        """Return the options of a trial."""
        return options_of(self.search.space, trial.params)

    def config(self, trial: optuna.trial.FrozenTrial) -> TrainConfig:
        """Return the configuration that trains a trial alone."""
        return self.search.config_of(self.options(trial))

    def failed(self) -> dict[int, str]:
        """Return why trials have failed, by number."""
        found = {}
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state is not optuna.trial.TrialState.FAIL:
                continue
            errors = [self.folder.error(job) for job in self.search.job_names(trial.number)]
            said = next((error for error in errors if error), "its objective is not a finite number")
            found[trial.number] = said.strip().splitlines()[-1]
        return found

    def states(self) -> Counter[str]:
        """Count the trials by their state."""
        return Counter(trial.state.name.lower() for trial in self.study.get_trials(deepcopy=False))

    def epochs(self) -> tuple[float, int]:
        """Return how many epochs were trained, and how many there were if no trial was ended.

        A run that went on for an epoch more than it should adds nothing.
        """
        trials = [one for one in self.study.get_trials(deepcopy=False) if one.state in (COMPLETE, PRUNED)]
        whole = self.search.span * self.search.folds
        trained = [one.last_step or 0 if one.state is PRUNED else whole for one in trials]
        return sum(trained), whole * len(trials)

    def importance(self) -> dict[str, float]:
        """Return the share of each parameter in how good a trial is.

        Returns:
            Shares that add up to 1; nothing if there are too few trials to tell.
        """
        values = {tuple(one.values) for one in self.study.get_trials(deepcopy=False) if one.state is COMPLETE}
        if len(values) < 4:
            return {}
        return dict(optuna.importance.get_param_importances(self.study))

    def table(self) -> list[dict[str, Any]]:
        """Return all trials, each with its number, its state, its objectives and its options."""
        aims = [str(aim) for aim in self.search.aims]
        return [
            {
                "trial": trial.number,
                "state": trial.state.name.lower(),
                **dict(zip(aims, trial.values or [None] * len(aims), strict=True)),
                **{name: self.options(trial)[name] for name in self.search.space.dimensions},
            }
            for trial in self.study.get_trials(deepcopy=False)
        ]

    def write_table(self) -> Path:
        """Write all trials as CSV, and return the path.

        Raises:
            BadRunFolder: it cannot be written.
        """
        rows = self.table()
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]) if rows else ["trial"], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        path = self.folder.path / TRIALS
        with refusing(path):
            replace_file(path, text.getvalue().encode())
        return path


def tune(
    search: Search,
    folder: FarmFolder,
    trials: int,
    blocks: Blocks,
    listener: Listener | None = None,
) -> Tuned:
    """Work on the trials that have no result yet.

    Args:
        search: the question.
        folder: of the farm.
        trials: how many there are to be.
        blocks: the ranks.
        listener: is told of all that happens.

    Raises:
        TuttiError: as `work_on` says.
    """
    search, count = _in_folder(search, folder), search.count(trials)
    study = open_study(folder.path, search.aims)
    method = Method(search.sampler, search.pruner, search.config.seed, search.span * search.folds)
    source = SearchJobs(
        Trials(folder.path, study, search.space, method),
        count,
        partial(search.jobs, folder.path.absolute() / SPLITS),
        search.aims,
        search.pruner != "none",
        search.span,
        partial(_history, folder),
    )
    outcome = work_on(
        folder,
        source,
        block=blocks.block,
        blocks=blocks.blocks,
        threads=blocks.threads,
        # More blocks would have nothing to do.
        jobs=search.at_a_time(trials),
        servers=search.servers,
        job_timeout_s=blocks.job_timeout_s,
        time_limit_s=blocks.time_limit_s,
        listener=listener,
    )
    return Tuned(search, folder, study, outcome)


def read_search(folder: FarmFolder) -> Tuned:
    """Read a search from its folder.

    Raises:
        BadRunFolder: it is none, or has no study yet.
    """
    if folder.plan.kind != KIND:
        raise BadRunFolder(f"{folder.path} is the farm of a '{folder.plan.kind}', and no search")
    if not (folder.path / JOURNAL).is_file():
        raise BadRunFolder(f"{folder.path} has no {JOURNAL} yet")
    search = _in_folder(Search.from_json(folder.plan.question), folder)
    return Tuned(search, folder, open_study(folder.path, search.aims))


def _history(folder: FarmFolder, job: str) -> list[EpochRecord]:
    return RunFolder(folder.job(job)).lines(EpochRecord).records
