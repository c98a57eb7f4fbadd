"""The samplers and pruners of a search, which are Optuna's. Only gp needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from tutti.errors import BadOption, UnknownName
from tutti.studies.score import Score
from tutti.studies.search.space import Space

GRID: Final = "grid"
"""The sampler that tries all combinations; they are put into the study's queue."""

POPULATION: Final = 16
"""The trials of a generation of the genetic sampler."""

SAMPLERS: Final[dict[str, Callable[[int], BaseSampler]]] = {
    # Running trials count as bad ones, so that simultaneous trials differ.
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=True),
    "gp": lambda seed: GPSampler(seed=seed, warn_independent_sampling=False),
    "cma-es": lambda seed: CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "random": lambda seed: RandomSampler(seed),
    GRID: lambda seed: RandomSampler(seed),
    "genetic": lambda seed: NSGAIISampler(seed=seed, population_size=POPULATION),
}
"""Functions that make a sampler from a seed."""

REDUCTION: Final = 3
"""One in REDUCTION trials continues at each rung of successive halving."""

RUNGS: Final = 3
"""The most rungs, as the first epochs are noisy."""


def _lowest(epochs: int) -> int:
    return max(1, epochs // REDUCTION**RUNGS)


def _asha(epochs: int) -> BasePruner:
    return SuccessiveHalvingPruner(min_resource=_lowest(epochs), reduction_factor=REDUCTION)


def _hyperband(epochs: int) -> BasePruner:
    # The last bracket of Optuna's never ends a trial: that would be a third of them with 9 epochs.
    highest = max(epochs // REDUCTION, _lowest(epochs))
    return HyperbandPruner(min_resource=_lowest(epochs), max_resource=highest, reduction_factor=REDUCTION)


PRUNERS: Final[dict[str, Callable[[int], BasePruner]]] = {
    "none": lambda _: NopPruner(),
    "median": lambda _: MedianPruner(),
    "asha": _asha,
    "hyperband": _hyperband,
}
"""Functions that make a pruner from the epochs of a trial over all folds."""


def check_methods(sampler: str, pruner: str, space: Space, scores: Sequence[Score], by_epochs: bool) -> None:
    """Refuse a sampler or a pruner that does not fit the search."""
    for kind, name, known in (("sampler", sampler, [*SAMPLERS]), ("pruner", pruner, [*PRUNERS])):
        if name not in known:
            raise UnknownName(kind, name, known)
    ranges = [name for name in space.distributions if not space.is_choice(name)]
    if sampler == GRID and ranges:
        raise BadOption(
            f"sampler grid: {ranges[0]} is a range; list its values with commas, or use another sampler"
        )
    if sampler == "cma-es" and (len(ranges) < 2 or len(scores) > 1):
        raise BadOption("sampler cma-es needs two ranges of numbers and one objective; use tpe")
    if pruner != "none" and not (len(scores) == 1 and scores[0].by_epoch and by_epochs):
        raise BadOption(
            f"pruner {pruner} compares epochs by one objective that each epoch has; give --epochs in place "
            "of --steps, and a metric, or use pruner none"
        )
