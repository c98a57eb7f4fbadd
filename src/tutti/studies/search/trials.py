"""The trials of a search, kept in an Optuna study; the same ones whatever the number of blocks.

    trial        0 1 2 3 │ 4 5 6 7 8
    may be seen  ▪ ▪ ▪ ▪ │ · · · · asked now          with `ahead` 5: trial 8 knows of the results 0 to 3

A trial is asked for once all trials have ended that are `ahead` or more before it, and sampler and pruner see
the results of exactly these, with a generator seeded by (seed, number of the trial). What blocks do, and in
which order trials end, changes nothing. Its price: of the newest `ahead - 1` results nothing is learned.

The study that samplers see is in memory, and is told as late as that. The study on the disk is told at once.

Several launches make the same trials, too: each has all of this, and hears of every result. One at a time
looks whether another has chosen the next trial, and else chooses it; what the study has first is what counts.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from tutti.studies.search.pruners import RULES
from tutti.studies.search.samplers import SAMPLERS
from tutti.studies.search.space import Choice, Range, Space
from tutti.studies.search.storage import NAME

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
    """True if Optuna can have the values themselves: it knows no lists, and takes 1 and true for the same."""
    values = choice.ends()
    scalars = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return scalars and len(set(values)) == len(values)


def _choices(choice: Choice) -> tuple[Any, ...]:
    return choice.ends() if _plain(choice) else choice.values


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
        pruner: a name in `RULES`.
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
        turn: makes a context that one of several launches is in at a time.

    Attributes:
        asked: how many have been asked for.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        method: Method,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._study, self._space, self._method, self._turn = study, space, method, turn
        self._distributions = distributions_of(space)
        self._pruner = RULES[method.pruner].make(method.epochs)
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
        self._read_attributes()
        for trial in study.get_trials(deepcopy=False):
            self._take_up(trial)
        self._tell_until(self.asked - method.ahead)

    @property
    def asked(self) -> int:
        """Number of trials that have been asked for."""
        return len(self._ids)

    @property
    def under_way(self) -> list[int]:
        """The trials that have no result."""
        return [number for number in range(self.asked) if not self.has_ended(number)]

    def has_ended(self, number: int) -> bool:
        """Tell whether a trial has a result."""
        return number in self._results

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of a trial."""
        return options_of(self._space, self._memory.get_trial(number).params)

    def may_ask(self) -> bool:
        """Tell whether all trials have ended whose results the next one may depend on."""
        last = self.asked - self._method.ahead
        return all(number in self._results for number in range(self._told, last + 1))

    def ask(self) -> int:
        """Begin the next trial, or take up what another launch has chosen for it; return its number."""
        number = self.asked
        self._tell_until(number - self._method.ahead + 1)
        with self._turn():
            kept = self._study.get_trials(deepcopy=False)
            if number < len(kept):
                self._read_attributes()
                self._take_up(kept[number])
            else:
                self._choose(number)
        return number

    def _choose(self, number: int) -> None:
        """Choose the parameters of a new trial."""
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

    def report(self, number: int, step: int, value: float) -> None:
        """Note a value of a trial that is under way."""
        self._reports.setdefault(number, {})[step] = value
        storage, at = self._study._storage, self._ids[number]
        # Another launch may have told it, and even come to the end.
        if step not in storage.get_trial(at).intermediate_values:
            with suppress(UpdateFinishedTrialError):
                storage.set_trial_intermediate_value(at, step, value)

    def prunes(self, number: int) -> bool:
        """Tell whether a trial is to end, by the values that have been reported."""
        trial = copy.copy(self._memory.get_trial(number))
        trial.intermediate_values = dict(self._reports[number])
        with self._memory.only(number - self._method.ahead + 1, number):
            return self._pruner.prune(self._seen, trial)

    def end(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """End a trial; its values, unless it has failed. If another launch has ended it, that holds."""
        self._reports.pop(number, None)
        found = None if values is None or not all(map(math.isfinite, values)) else list(values)
        state = FAILED if found is None else state
        storage, at = self._study._storage, self._ids[number]
        kept = storage.get_trial(at)
        if not kept.state.is_finished():
            with suppress(UpdateFinishedTrialError):
                for name, value in self._memory.get_trial(number).system_attrs.items():
                    if name not in kept.system_attrs:
                        storage.set_trial_system_attr(at, name, value)
                storage.set_trial_state_values(at, state, found)
            kept = storage.get_trial(at)
        self._results[number] = _result(kept)

    def _read_attributes(self) -> None:
        """Take up what samplers have noted of the study."""
        for name, value in self._study._storage.get_study_system_attrs(self._study._study_id).items():
            self._memory.set_study_system_attr(self._seen._study_id, name, value)

    def _take_up(self, trial: FrozenTrial) -> None:
        """Put a trial that is kept into memory, as one that is under way there."""
        self._ids.append(trial._trial_id)
        if trial.state.is_finished():
            self._results[trial.number] = _result(trial)
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


def _result(trial: FrozenTrial) -> _Result:
    return _Result(trial.state, trial.values, dict(trial.intermediate_values))
