"""The samplers of a search: what chooses the parameters of the next trial. No torch, but for gp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

from tutti.errors import BadOption, UnknownName

Distributions = Mapping[str, BaseDistribution]


class GridSampler(BaseSampler):
    """All combinations in turn, the last parameter changing fastest.

    Args:
        distributions: of the parameters; each a choice.
    """

    def __init__(self, distributions: Distributions) -> None:
        self._choices = {
            name: one.choices
            for name, one in distributions.items()
            if isinstance(one, CategoricalDistribution)
        }
        free = [name for name in distributions if name not in self._choices]
        if free:
            raise BadOption(
                f"--sampler grid: --space.{free[0]} is a range; give its values with commas, or use another "
                "sampler"
            )

    @property
    def points(self) -> int:
        """Number of combinations."""
        return prod(map(len, self._choices.values()))

    @override
    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    @override
    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    @override
    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        left = trial.number
        for name in reversed(self._choices):
            left, at = divmod(left, len(self._choices[name]))
            if name == param_name:
                return self._choices[name][at]
        raise AssertionError(f"{param_name} is no parameter of the grid")


class FixedSpaceTpe(TPESampler):
    """TPE over a space that is the same for all trials, so that they need not be looked through for it.

    Args:
        seed: of its random numbers.
        distributions: of the parameters.
    """

    def __init__(self, seed: int, distributions: Distributions) -> None:
        # Trials that run count as bad ones: those asked for at the same time differ.
        super().__init__(seed=seed, constant_liar=True)
        self._free = {name: one for name, one in sorted(distributions.items()) if not one.single()}

    @override
    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        # Of several objectives it models each parameter by itself.
        return self._free if len(study.directions) == 1 else {}


@dataclass(frozen=True)
class Sampler:
    """A kind of sampler.

    Attributes:
        about: it, in a few words.
        make: makes one from a seed and the distributions.
        numbers: it needs at least two ranges of numbers.
        several: it can pursue several objectives.
    """

    about: str
    make: Callable[[int, Distributions], BaseSampler]
    numbers: bool = False
    several: bool = True


def _cma_es(seed: int, distributions: Distributions) -> BaseSampler:
    return CmaEsSampler(seed=seed, warn_independent_sampling=False)


def _gp(seed: int, distributions: Distributions) -> BaseSampler:
    return GPSampler(seed=seed, warn_independent_sampling=False)


def _genetic(seed: int, distributions: Distributions) -> BaseSampler:
    return NSGAIISampler(seed=seed, population_size=POPULATION)


POPULATION: Final = 16
"""The trials of a generation."""

SAMPLERS: Final = {
    "tpe": Sampler("a model of good and bad values (TPE)", FixedSpaceTpe),
    "gp": Sampler("Gaussian processes", _gp),
    "cma-es": Sampler("evolution of a normal distribution, for numbers", _cma_es, True, False),
    "random": Sampler("random values", lambda seed, _: RandomSampler(seed)),
    "grid": Sampler("all combinations", lambda _, distributions: GridSampler(distributions)),
    "genetic": Sampler(f"generations of {POPULATION} trials (NSGA-II)", _genetic),
}
"""The samplers by name."""


def check_sampler(name: str, distributions: Distributions, objectives: int) -> None:
    """Refuse a sampler that does not fit.

    Raises:
        UnknownName: there is no such sampler.
        BadOption: it cannot sample these parameters, or has no use for several objectives.
    """
    if name not in SAMPLERS:
        raise UnknownName("sampler", name, SAMPLERS)
    kind = SAMPLERS[name]
    numbers = [one for one in distributions.values() if not isinstance(one, CategoricalDistribution)]
    if kind.numbers and len(numbers) < 2:
        raise BadOption(f"--sampler {name} needs at least two ranges of numbers to search; use --sampler tpe")
    if objectives > 1 and not kind.several:
        raise BadOption(f"--sampler {name} is for one objective; use genetic or tpe for {objectives}")
    kind.make(0, distributions)
