"""The pairings of options and strategies that every command refuses, each with its remedy.

A configuration is checked when it is made, so before any rank is started. What depends on the strategy is
checked once that is known: before the ranks are started where this process has torch, else on the ranks.
Needs no torch, as configurations are made without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tutti.errors import BadOption

if TYPE_CHECKING:
    from tutti.run.config import TrainConfig
    from tutti.strategies import Strategy
    from tutti.strategies.base import Pace

NEEDS_GPU_SAMPLES: Final = (
    "--cuda-graph on is for samples that lie on a GPU; use --device cuda, a data set that takes at "
    "most half of its memory, and no --balance queue; or leave --cuda-graph at auto"
)

OPTIONS: Final[tuple[tuple[Callable[[TrainConfig], bool], Callable[[TrainConfig], str]], ...]] = (
    (
        lambda c: c.epochs is not None and c.steps is not None,
        lambda c: "both --epochs and --steps are given; give one of them",
    ),
    (
        lambda c: c.levels == 2 and not c.servers,
        lambda c: "--levels is 2, but there is no server for the upper level; give --servers 1 or more",
    ),
    (
        lambda c: c.levels == 1 and c.climb_every is not None,
        lambda c: "--climb-every is for two levels of centres; give --levels 2, or leave it out",
    ),
    (
        lambda c: c.parallel is None and bool(c.parallel_options),
        lambda c: (
            f"--parallel.{next(iter(c.parallel_options))} is given, but no --parallel; name a way, such as "
            "--parallel pipeline"
        ),
    ),
    (
        lambda c: c.parallel is not None and c.servers > 0,
        lambda c: "--servers keep the centre of whole models; leave them out, or --parallel",
    ),
    (
        lambda c: c.parallel is not None and c.balance != "none",
        lambda c: f"--balance {c.balance} is for ranks with whole models; leave it or --parallel out",
    ),
    (
        lambda c: c.parallel is not None and c.device == "cuda",
        lambda c: f"--parallel {c.parallel} computes on the CPU; leave --device cuda out",
    ),
    (
        lambda c: c.cuda_graph == "on" and (c.device == "cpu" or c.balance == "queue"),
        lambda c: NEEDS_GPU_SAMPLES,
    ),
)
"""Pairs of options: whether a configuration has them, and what is said of it."""


def check_options(config: TrainConfig) -> None:
    """Refuse options that do not go together, whatever the strategy.

    Raises:
        BadOption: the message names what to leave out or to give.
    """
    for refused, message in OPTIONS:
        if refused(config):
            raise BadOption(message(config))


@dataclass(frozen=True)
class Pairing:
    """A strategy, and the run that it is to be used in.

    Attributes:
        strategy: of the workers.
        config: the configuration.
        compared: the run is compared with that of one process.
    """

    strategy: Strategy
    config: TrainConfig
    compared: bool = False

    @property
    def together(self) -> bool:
        """True if the workers make each update together."""
        return self.strategy.pace.name == "TOGETHER"


def _has_centre(pairing: Pairing) -> bool:
    from tutti.parameter_server.base import Centre

    return Centre in pairing.strategy.needs


def _serves(pairing: Pairing) -> bool:
    from tutti.strategies.centred import Centred

    return isinstance(pairing.strategy, Centred)


STRATEGIES: Final[tuple[tuple[Callable[[Pairing], bool], Callable[[Pairing], str]], ...]] = (
    (
        lambda p: p.compared and not p.together,
        lambda p: (
            f"strategy '{p.strategy.name}' gives every worker batches of its own, so it does not follow "
            "sequential training; compare one that makes each update together, such as '--strategy sync'"
        ),
    ),
    (
        lambda p: not p.compared and _needed(p, "balance") is not p.strategy.pace,
        lambda p: _unfit(p, "balance"),
    ),
    (
        lambda p: not p.compared and _needed(p, "validate") is not p.strategy.pace,
        lambda p: _unfit(p, "validate"),
    ),
    (
        lambda p: p.config.parallel is not None and not p.together,
        lambda p: (
            "--parallel needs a strategy whose workers make each update together, and those of "
            f"'{p.strategy.name}' do not; leave --strategy out, or use sync"
        ),
    ),
    (
        lambda p: p.config.servers > 0 and not _serves(p),
        lambda p: (
            f"strategy '{p.strategy.name}' cannot run on servers: only strategies derived from "
            "tutti.strategies.centred.Centred say what a server does; leave --servers out"
        ),
    ),
    (
        lambda p: p.config.device != "cpu" and _has_centre(p),
        lambda p: (
            f"strategy '{p.strategy.name}' keeps its centre in the CPU's memory, and --device is "
            f"'{p.config.device}'; use --strategy solo there, or --device cpu"
        ),
    ),
)
"""Strategies in a run: whether the run is refused, and what is said of it."""

PACES: Final[dict[str, dict[str, str]]] = {
    "balance": {"speed": "TOGETHER", "queue": "FREE"},
    "validate": {"distributed": "FREE", "background": "FREE"},
}
"""The pace of workers that the values of an option need; others go with any."""

REMEDIES: Final[dict[str, dict[str, str]]] = {
    "balance": {"TOGETHER": "--balance speed", "ABREAST": "--balance none", "FREE": "--balance queue"},
    "validate": dict.fromkeys(("TOGETHER", "ABREAST", "FREE"), "--validate pause"),
}
"""The value of an option that goes with a pace."""

WORKERS: Final = {
    "TOGETHER": "make each update together, from one batch",
    "ABREAST": "have batches of their own and make every step at the same time",
    "FREE": "have batches of their own and wait for nobody",
}
"""The workers of a pace, in words."""


def _needed(pairing: Pairing, option: str) -> Pace:
    """Return the pace that the option's value needs: the strategy's own where any will do."""
    pace = pairing.strategy.pace
    name = PACES[option].get(getattr(pairing.config, option))
    return pace if name is None else type(pace)[name]


def _unfit(pairing: Pairing, option: str) -> str:
    from tutti.strategies import STRATEGIES as KINDS

    strategy, config, needed = pairing.strategy, pairing.config, _needed(pairing, option)
    fit = ", ".join(sorted(name for name, kind in KINDS.items() if kind.pace is needed))
    given = f"'{strategy.name}'" if config.parallel is None else f"--parallel {config.parallel}"
    remedy = REMEDIES[option][strategy.pace.name]
    other = ", or such a strategy" if config.parallel is None else ""
    return (
        f"--{option} {getattr(config, option)} is for strategies whose workers {WORKERS[needed.name]} "
        f"({fit}), but those of {given} {WORKERS[strategy.pace.name]}; use {remedy}{other}"
    )


def check_pairing(strategy: Strategy, config: TrainConfig, compared: bool = False) -> None:
    """Refuse a strategy that does not go with the options of the run.

    Args:
        strategy: of the workers.
        config: the configuration.
        compared: the run is compared with that of one process.

    Raises:
        BadOption: the message names what goes together.
    """
    pairing = Pairing(strategy, config, compared)
    for refused, message in STRATEGIES:
        if refused(pairing):
            raise BadOption(message(pairing))
