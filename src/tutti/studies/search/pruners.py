"""The pruners of a search: what ends a trial that is not promising. Needs Optuna, and no torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from optuna.exceptions import ExperimentalWarning
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
    WilcoxonPruner,
)

from tutti.errors import BadOption, UnknownName
from tutti.studies.search.objectives import Aim

REDUCTION: Final = 3
"""One of so many trials goes on at each rung of successive halving."""

RUNGS: Final = 3
"""Limit on the rungs, so that the lowest is not at a noisy beginning."""


@dataclass(frozen=True)
class Pruner:
    """A kind of pruner.

    Attributes:
        about: it, in a few words.
        make: makes one for trials of so many epochs, those of all folds added up.
        by_job: it compares what the jobs of a trial end with, and not epochs.
        by_last: what a trial is worth is what its last stage ends with, and not the mean over its jobs.
    """

    about: str
    make: Callable[[int], BasePruner]
    by_job: bool = False
    by_last: bool = False

    def step(self, stage: int) -> int:
        """Return the number by which it knows the end of a stage, counted from 0."""
        return REDUCTION**stage if self.by_last else stage

    def together(self, jobs: int) -> int:
        """Return how many jobs of a trial make a stage, after which it may end."""
        return jobs // len(DIVISORS) if self.by_last else 1


def _asha(epochs: int) -> BasePruner:
    return SuccessiveHalvingPruner(min_resource=_lowest(epochs), reduction_factor=REDUCTION)


def _hyperband(epochs: int) -> BasePruner:
    # Its last bracket would be one whose trials are never ended: a third of them, where there are 9 epochs.
    lowest = _lowest(epochs)
    highest = max(epochs // REDUCTION, lowest)
    return HyperbandPruner(min_resource=lowest, max_resource=highest, reduction_factor=REDUCTION)


def _wilcoxon(epochs: int) -> BasePruner:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return WilcoxonPruner(p_threshold=0.1, n_startup_steps=2)


def _lowest(epochs: int) -> int:
    return max(1, epochs // REDUCTION**RUNGS)


PRUNERS: Final = {
    "none": Pruner("every trial is trained to its end", lambda _: NopPruner()),
    "median": Pruner("worse than half of the trials before were at the same epoch", lambda _: MedianPruner()),
    "asha": Pruner(f"not among the best 1 / {REDUCTION} at 1, {REDUCTION}, {REDUCTION**2} ... epochs", _asha),
    "hyperband": Pruner("as asha, with several first rungs in turn", _hyperband),
    "wilcoxon": Pruner("worse than the best trial on the same folds (signed-rank test)", _wilcoxon, True),
}
"""The pruners by name."""

SUCCESSIVE: Final = "data"
"""The value of --successive."""

_ON_SUBSETS: Final = Pruner(
    "not among the best third on a small subset of the data",
    lambda _: SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION),
    by_job=True,
    by_last=True,
)

RULES: Final = {**PRUNERS, SUCCESSIVE: _ON_SUBSETS}
"""The pruners, and what ends trials with --successive."""

DIVISORS: Final = (REDUCTION**2, REDUCTION, 1)
"""A trial is trained on one in so many samples with --successive: on the last ones if it is promising."""

LEAST_FOLDS: Final = 3
"""The folds that a pruner by folds needs."""


def check_pruner(name: str, aims: list[Aim], folds: int, by_epochs: bool) -> None:
    """Refuse a pruner that has nothing to compare.

    Args:
        name: of the pruner.
        aims: of the search.
        folds: of each trial; 1: none.
        by_epochs: whether the trials' length is given in epochs.

    Raises:
        UnknownName: there is no such pruner.
        BadOption: it does not fit.
    """
    if name not in PRUNERS:
        raise UnknownName("pruner", name, PRUNERS)
    if name == "none":
        return
    if len(aims) > 1:
        raise BadOption(
            f"--pruner {name} compares trials by one objective; use --pruner none for {len(aims)}"
        )
    if PRUNERS[name].by_job:
        if folds < LEAST_FOLDS:
            raise BadOption(
                f"--pruner {name} compares folds; give --folds {LEAST_FOLDS} or more, or use asha"
            )
        return
    if not aims[0].by_epoch:
        raise BadOption(f"--pruner {name} compares epochs, which have no '{aims[0].name}'; use --pruner none")
    if not by_epochs:
        raise BadOption(f"--pruner {name} compares epochs; give --epochs in place of --steps")


def check_successive(given: str | None, pruner: str, aims: list[Aim]) -> None:
    """Refuse --successive with what it does not go with.

    Raises:
        UnknownName: there is nothing of that kind.
        BadOption: it does not fit.
    """
    if given is None:
        return
    if given != SUCCESSIVE:
        raise UnknownName("value", given, [SUCCESSIVE], of="--successive")
    if pruner != "none":
        raise BadOption(f"--successive data ends trials itself; leave --pruner {pruner} out, or use it alone")
    if len(aims) > 1:
        raise BadOption(f"--successive data compares trials by one objective; give one of {len(aims)}")
    if not aims[0].by_epoch:
        raise BadOption(
            f"--successive data compares runs on other amounts of data by '{aims[0].name}'; give "
            "loss or a metric"
        )
