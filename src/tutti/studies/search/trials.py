"""The trials of a search, kept in an Optuna study; the same ones whatever the number of blocks.

    trial        0 1 2 3 │ 4 5 6 7 8
    may be seen  ▪ ▪ ▪ ▪ │ · · · · asked now          with `ahead` 5: trial 8 knows of the results 0 to 3

A trial is asked for once all trials have ended that are `ahead` or more before it, and sampler and pruner see
the results of exactly these, with a generator seeded by (seed, number of the trial). What blocks do, and in
which order trials end, changes nothing. Its price: of the newest `ahead - 1` results nothing is learned.

The study that samplers see is in memory, and is told as late as that. The study on the disk is told at once.
"""

from __future__ import annotations

import copy
import fcntl
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from tutti.errors import BadOption
from tutti.studies.search.objectives import Aim
from tutti.studies.search.pruners import PRUNERS
from tutti.studies.search.samplers import SAMPLERS
from tutti.studies.search.space import Choice, Range, Space

STUDY: Final = "study.journal"
"""The name of Optuna's journal in the folder of a farm."""

NAME: Final = "tutti"
"""The name of a study in the journal of its farm."""

COMPLETE, PRUNED, FAILED = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Return the parameters of a space as Optuna has them."""
    found: dict[str, BaseDistribution] = {}
    for name, one in space.dimensions.items():
        if isinstance(one, Choice):
            found[name] = CategoricalDistribution(_choices(one))
        elif one.whole:
            found[name] = IntDistribution(int(one.low), int(one.high), log=one.log)
        else:
            found[name] = FloatDistribution(one.low, one.high, log=one.log)
    return found


def options_of(space: Space, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that Optuna's parameters stand for."""
    return {
        name: json.loads(value) if isinstance(one, Choice) and not _plain(one) else value
        for name, value in parameters.items()
        if isinstance(one := space.dimensions[name], Choice | Range)
    }


def _plain(choice: Choice) -> bool:
    """Whether Optuna can have the values themselves: it knows no lists, and takes 1 and true for the same."""
    values = choice.ends()
    scalars = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return scalars and len(set(values)) == len(values)


def _choices(choice: Choice) -> tuple[Any, ...]:
    return choice.ends() if _plain(choice) else choice.values


class StudyFile(JournalFileBackend):
    """Optuna's journal, locked by the kernel: whoever is killed leaves no lock behind.

    It is not flushed to the disk: if the power goes, the trials that it had not kept are asked for again,
    with the same parameters.
    """

    @override
    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with open(self._file_path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs))


def open_study(where: Path | str, name: str, aims: Sequence[Aim]) -> optuna.Study:
    """Open a study, or make it.

    Args:
        where: the file of a journal, or the URL of a database.
        name: of the study.
        aims: its objectives.

    Raises:
        BadOption: the database cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = [StudyDirection.MAXIMIZE if aim.higher else StudyDirection.MINIMIZE for aim in aims]
    storage: BaseStorage | str = str(where)
    try:
        if isinstance(where, Path):
            storage = JournalStorage(StudyFile(str(where)))
        return optuna.create_study(
            storage=storage, study_name=name, directions=directions, load_if_exists=True
        )
    except OSError:
        raise
    except Exception as error:  # whatever a database's driver has
        raise BadOption(f"--storage {where} cannot be opened: {error}") from error


class _Window(InMemoryStorage):
    """Trials in memory, of which only some may be seen."""

    def __init__(self) -> None:
        super().__init__()
        self._before: int | None = None
        self._own = -1

    @contextmanager
    def only(self, before: int, own: int) -> Iterator[None]:
        """Show the trials before a number, and one more."""
        self._before, self._own = before, own
        try:
            yield
        finally:
            self._before = None

    @override
    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        found = super().get_all_trials(study_id, False, states)
        if self._before is not None:
            found = [trial for trial in found if trial.number < self._before or trial.number == self._own]
        return copy.deepcopy(found) if deepcopy else found

    @override
    def get_best_trial(self, study_id: int) -> FrozenTrial:
        return BaseStorage.get_best_trial(self, study_id)


@dataclass(frozen=True)
class Method:
    """The method of a search.

    Attributes:
        sampler: a name in `SAMPLERS`.
        pruner: a name in `PRUNERS`.
        seed: decides all that is random.
        ahead: how many trials may be under way; the results of these are not known to each other.
        epochs: of a trial, those of all folds added up.
    """

    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 0
    ahead: int = 8
    epochs: int = 1


@dataclass(frozen=True)
class _Result:
    """The end of a trial."""

    state: TrialState
    values: list[float] | None
    reports: dict[int, float]


class Trials:
    """The trials of a search.

    Args:
        study: where they are kept; those that are there are taken up.
        space: what is searched.
        method: how.

    Attributes:
        asked: how many have been asked for.
    """

    def __init__(self, study: optuna.Study, space: Space, method: Method) -> None:
        self._study, self._space, self._method = study, space, method
        self._distributions = distributions_of(space)
        self._pruner = PRUNERS[method.pruner].make(method.epochs)
        self._memory = _Window()
        self._seen = optuna.create_study(
            storage=self._memory,
            study_name=NAME,
            directions=study.directions,
            pruner=self._pruner,
            sampler=optuna.samplers.RandomSampler(0),
        )
        self._ids: list[int] = []
        self._results: dict[int, _Result] = {}
        self._reports: dict[int, dict[int, float]] = {}
        self._told = 0
        for name, value in study._storage.get_study_system_attrs(study._study_id).items():
            self._memory.set_study_system_attr(self._seen._study_id, name, value)
        for trial in study.get_trials(deepcopy=False):
            self._take_up(trial)
        self._tell_until(self.asked - method.ahead)

    @property
    def asked(self) -> int:
        """How many trials have been asked for."""
        return len(self._ids)

    @property
    def under_way(self) -> list[int]:
        """The trials that have no result."""
        return [number for number in range(self.asked) if number not in self._results]

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of a trial."""
        return options_of(self._space, self._memory.get_trial(number).params)

    def may_ask(self) -> bool:
        """Tell whether all trials have ended whose results the next one may depend on."""
        last = self.asked - self._method.ahead
        return all(number in self._results for number in range(self._told, last + 1))

    def ask(self) -> int:
        """Begin the next trial, and return its number."""
        number = self.asked
        self._tell_until(number - self._method.ahead + 1)
        seed = int(np.random.SeedSequence((self._method.seed, number)).generate_state(1)[0])
        self._seen.sampler = SAMPLERS[self._method.sampler].make(seed, self._distributions)
        self._seen.ask(dict(self._distributions))
        storage, study = self._study._storage, self._study._study_id
        there = storage.get_study_system_attrs(study)
        for name, value in self._memory.get_study_system_attrs(self._seen._study_id).items():
            if there.get(name) != value:
                storage.set_study_system_attr(study, name, value)
        # All at once: whoever is killed leaves a whole trial, or none.
        self._ids.append(storage.create_new_trial(study, template_trial=self._memory.get_trial(number)))
        return number

    def report(self, number: int, step: int, value: float) -> None:
        """Note a value of a trial that is under way."""
        self._reports.setdefault(number, {})[step] = value
        self._study._storage.set_trial_intermediate_value(self._ids[number], step, value)

    def prunes(self, number: int) -> bool:
        """Tell whether a trial is to end, by the values that have been reported."""
        trial = copy.copy(self._memory.get_trial(number))
        trial.intermediate_values = dict(self._reports[number])
        with self._memory.only(number - self._method.ahead + 1, number):
            return self._pruner.prune(self._seen, trial)

    def end(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """End a trial; its values, unless it has failed."""
        reports = self._reports.pop(number, {})
        found = None if values is None or not all(map(math.isfinite, values)) else list(values)
        state = FAILED if found is None else state
        storage, at = self._study._storage, self._ids[number]
        there = storage.get_trial(at).system_attrs
        for name, value in self._memory.get_trial(number).system_attrs.items():
            if name not in there:
                storage.set_trial_system_attr(at, name, value)
        storage.set_trial_state_values(at, state, found)
        self._results[number] = _Result(state, found, reports)

    def _take_up(self, trial: FrozenTrial) -> None:
        """Put a trial that is kept into memory, as one that is under way there."""
        self._ids.append(trial._trial_id)
        if trial.state.is_finished():
            self._results[trial.number] = _Result(trial.state, trial.values, dict(trial.intermediate_values))
        begun = copy.copy(trial)
        begun.state, begun.values, begun.intermediate_values = TrialState.RUNNING, None, {}
        begun.datetime_complete = None
        self._memory.create_new_trial(self._seen._study_id, template_trial=begun)

    def _tell_until(self, end: int) -> None:
        """Let the trials before a number be seen."""
        while self._told < end:
            result = self._results[self._told]
            for step, value in result.reports.items():
                self._memory.set_trial_intermediate_value(self._told, step, value)
            self._memory.set_trial_state_values(self._told, result.state, result.values)
            self._told += 1
