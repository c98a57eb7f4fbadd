"""The trials of a search, in a study of Optuna.

FARM/study.journal    Optuna's journal
FARM/study.lock       locked while a launch chooses a trial

The seed of the search and the number of the trial seed the sampler, so one block makes the same trials each
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from tutti.errors import BadRunFolder
from tutti.records.files import locked_file
from tutti.studies.score import Score
from tutti.studies.search.methods import GRID, PRUNERS, SAMPLERS
from tutti.studies.search.space import Space

JOURNAL: Final = "study.journal"
LOCK: Final = "study.lock"

NAME: Final = "tutti"
"""The name of the study in its journal."""

COMPLETE, PRUNED, FAILED = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


def open_study(folder: Path, scores: Sequence[Score]) -> optuna.Study:
    """Open the study of a farm, or make it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            study_name=NAME,
            directions=["maximize" if one.higher else "minimize" for one in scores],
            load_if_exists=True,
        )
    except (ValueError, KeyError) as error:
        raise BadRunFolder(f"{folder / JOURNAL} is damaged: {error}; begin a new search") from error


@dataclass(frozen=True)
class Method:
    """The method of a search."""

    sampler: str = "tpe"  # a name in `SAMPLERS`
    pruner: str = "none"  # a name in `PRUNERS`
    seed: int = 0
    epochs: int = 1  # of a trial, over all folds


class Trials:
    """The trials of a search; several launches may share them."""

    def __init__(self, folder: Path, study: optuna.Study, space: Space, method: Method) -> None:
        self._folder, self._study, self._space, self._method = folder, study, space, method
        study.pruner = PRUNERS[method.pruner](method.epochs)
        self._running: dict[int, Trial] = {}
        if method.sampler == GRID:
            with self._turn():
                if not study.get_trials(deepcopy=False):
                    for point in space.points():
                        study.enqueue_trial(point)

    def ask(self, count: int) -> int | None:
        """Begin a new trial and return its number; None: there are `count` trials already."""
        with self._turn():
            number = len([one for one in self._all() if one.state is not TrialState.WAITING])
            if number >= count:
                return None
            seed = int(np.random.SeedSequence((self._method.seed, number)).generate_state(1)[0])
            self._study.sampler = SAMPLERS[self._method.sampler](seed)
            trial = self._study.ask({**self._space.distributions})
        self._running[trial.number] = trial
        return trial.number

    def take_over(self) -> list[int]:
        """Take over the running trials of other launches, and return their numbers."""
        running = [one for one in self._all() if one.state is TrialState.RUNNING]
        new = [one for one in running if one.number not in self._running]
        self._running |= {one.number: Trial(self._study, one._trial_id) for one in new}
        return [one.number for one in new]

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of a trial."""
        return self._space.options(self._all()[number].params)

    def has_ended(self, number: int) -> bool:
        """Return whether a trial has a result, from any launch."""
        return self._all()[number].state.is_finished()

    def report(self, number: int, step: int, value: float) -> None:
        """Report the value of a trial at a step, once."""
        trial = self._all()[number]
        if not trial.state.is_finished() and step not in trial.intermediate_values:
            self._running[number].report(value, step)

    def prunes(self, number: int) -> bool:
        """Return whether the pruner ends a trial, by the values reported so far."""
        return not self.has_ended(number) and self._running[number].should_prune()

    def end(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """End a trial, with its values if it is complete. A result of another launch stays."""
        if state is COMPLETE and not all(map(math.isfinite, values or [math.nan])):
            state, values = FAILED, None
        # A pruned trial's value is the last one reported.
        self._study.tell(number, values, state, skip_if_finished=True)

    def _all(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _turn(self) -> Any:
        return locked_file(self._folder / LOCK)
