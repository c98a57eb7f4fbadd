"""Optuna's samplers and pruners, by the names that a search gives them. No torch, but for gp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from tutti.errors import BadOption, UnknownName
from tutti.studies.search.objectives import Aim

GRID: Final = "grid"
"""The sampler that tries all combinations: they are put into the study's queue."""

POPULATION: Final = 16
"""The trials of a generation."""

SAMPLERS: Final[dict[str, Callable[[int], BaseSampler]]] = {
    # Running trials count as bad ones, so that those asked for at the same time differ.
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=True),
    "gp": lambda seed: GPSampler(seed=seed, warn_independent_sampling=False),
    "cma-es": lambda seed: CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "random": lambda seed: RandomSampler(seed),
    GRID: lambda seed: RandomSampler(seed),
    "genetic": lambda seed: NSGAIISampler(seed=seed, population_size=POPULATION),
}
"""Each makes a sampler from a seed."""

SINGLE: Final = ("cma-es",)
"""The samplers for a single objective."""

REDUCTION: Final = 3
"""Successive halving lets one in three trials go on at each rung."""

RUNGS: Final = 3
"""Limit on the rungs: the lowest should not be at a noisy beginning."""


def _lowest(epochs: int) -> int:
    return max(1, epochs // REDUCTION**RUNGS)


def _asha(epochs: int) -> BasePruner:
    return SuccessiveHalvingPruner(min_resource=_lowest(epochs), reduction_factor=REDUCTION)


def _hyperband(epochs: int) -> BasePruner:
    # Its last bracket never ends a trial: with 9 epochs that would be a third of them.
    highest = max(epochs // REDUCTION, _lowest(epochs))
    return HyperbandPruner(min_resource=_lowest(epochs), max_resource=highest, reduction_factor=REDUCTION)


PRUNERS: Final[dict[str, Callable[[int], BasePruner]]] = {
    "none": lambda _: NopPruner(),
    "median": lambda _: MedianPruner(),
    "asha": _asha,
    "hyperband": _hyperband,
}
"""Each makes a pruner for trials of so many epochs, those of all folds added up."""


def check_sampler(name: str, distributions: Mapping[str, BaseDistribution], objectives: int) -> None:
    """Refuse a sampler that does not fit.

    Raises:
        UnknownName: there is no such sampler.
        BadOption: it cannot sample these parameters, or has no use for several objectives.
    """
    if name not in SAMPLERS:
        raise UnknownName("sampler", name, SAMPLERS)
    ranges = [key for key, one in distributions.items() if not isinstance(one, CategoricalDistribution)]
    if name == GRID and ranges:
        raise BadOption(
            f"--sampler grid: --space.{ranges[0]} is a range; give its values with commas, or use another "
            "sampler"
        )
    if name == "cma-es" and len(ranges) < 2:
        raise BadOption("--sampler cma-es needs at least two ranges of numbers to search; use --sampler tpe")
    if objectives > 1 and name in SINGLE:
        raise BadOption(f"--sampler {name} is for one objective; use genetic or tpe for {objectives}")


def check_pruner(name: str, aims: Sequence[Aim], by_epochs: bool) -> None:
    """Refuse a pruner that has nothing to compare.

    Args:
        name: of the pruner.
        aims: of the search.
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
    if not aims[0].by_epoch:
        raise BadOption(f"--pruner {name} compares epochs, which have no '{aims[0].name}'; use --pruner none")
    if not by_epochs:
        raise BadOption(f"--pruner {name} compares epochs; give --epochs in place of --steps")
