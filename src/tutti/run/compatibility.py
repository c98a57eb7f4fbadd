"""The pairings of options and strategies that every command refuses, each with its remedy.

A configuration is checked when it is made, so before any rank is started. What depends on the strategy is
checked once that is known: before the ranks are started where this process has torch, else on the ranks.
Needs no torch, as configurations are made without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tutti.errors import BadOption

if TYPE_CHECKING:
    from tutti.run.config import TrainConfig
    from tutti.strategies import Strategy

NEEDS_GPU_SAMPLES: Final = (
    "--cuda-graph on is for samples that lie on a GPU; use --device cuda, a data set that takes at "
    "most half of its memory, and no --balance queue; or leave --cuda-graph at auto"
)

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


def refused_options(c: TrainConfig) -> Iterator[str]:
    """Describe the options of a configuration that do not go together, whatever the strategy."""
    if c.epochs is not None and c.steps is not None:
        yield "both --epochs and --steps are given; give one of them"
    if c.levels == 2 and not c.servers:
        yield "--levels is 2, but there is no server for the upper level; give --servers 1 or more"
    if c.levels == 1 and c.climb_every is not None:
        yield "--climb-every is for two levels of centres; give --levels 2, or leave it out"
    if c.parallel is None and c.parallel_options:
        given = f"--parallel.{next(iter(c.parallel_options))}"
        yield f"{given} is given, but no --parallel; name a way, such as --parallel pipeline"
    if c.parallel is not None and c.servers > 0:
        yield "--servers keep the centre of whole models; leave them out, or --parallel"
    if c.parallel is not None and c.balance != "none":
        yield f"--balance {c.balance} is for ranks with whole models; leave it or --parallel out"
    if c.parallel is not None and c.device == "cuda":
        yield f"--parallel {c.parallel} computes on the CPU; leave --device cuda out"
    if c.cuda_graph == "on" and (c.device == "cpu" or c.balance == "queue"):
        yield NEEDS_GPU_SAMPLES


def refused_strategy(strategy: Strategy, c: TrainConfig, compared: bool) -> Iterator[str]:
    """Describe what of a run does not go with its strategy.

    Args:
        strategy: of the workers.
        c: the configuration of the run.
        compared: the run is compared with that of one process.
    """
    from tutti.parameter_server.base import Centre
    from tutti.strategies.centred import Centred

    name, together = f"'{strategy.name}'", strategy.pace.name == "TOGETHER"
    if compared and not together:
        yield (
            f"strategy {name} gives every worker batches of its own, so it does not follow sequential "
            "training; compare one that makes each update together, such as '--strategy sync'"
        )
    for option in () if compared else ("balance", "validate"):
        needed = PACES[option].get(getattr(c, option), strategy.pace.name)
        if needed != strategy.pace.name:
            yield _unfit(strategy, c, option, needed)
    if c.parallel is not None and not together:
        yield (
            "--parallel needs a strategy whose workers make each update together, and those of "
            f"{name} do not; leave --strategy out, or use sync"
        )
    if c.servers > 0 and not isinstance(strategy, Centred):
        yield (
            f"strategy {name} cannot run on servers: only strategies derived from "
            "tutti.strategies.centred.Centred say what a server does; leave --servers out"
        )
    if c.device != "cpu" and Centre in strategy.needs:
        yield (
            f"strategy {name} keeps its centre in the CPU's memory, and --device is '{c.device}'; use "
            "--strategy solo there, or --device cpu"
        )


def _unfit(strategy: Strategy, config: TrainConfig, option: str, needed: str) -> str:
    from tutti.strategies import STRATEGIES

    pace, whole = strategy.pace.name, config.parallel is None
    fit = ", ".join(sorted(name for name, kind in STRATEGIES.items() if kind.pace.name == needed))
    given = f"'{strategy.name}'" if whole else f"--parallel {config.parallel}"
    return (
        f"--{option} {getattr(config, option)} is for strategies whose workers {WORKERS[needed]} "
        f"({fit}), but those of {given} {WORKERS[pace]}; use {REMEDIES[option][pace]}"
        f"{', or such a strategy' if whole else ''}"
    )


def check_pairing(strategy: Strategy, config: TrainConfig, compared: bool = False) -> None:
    """Refuse a strategy that does not go with the options of the run; `compared`: with one process.

    Raises:
        BadOption: the message names what goes together.
    """
    for message in refused_strategy(strategy, config, compared):
        raise BadOption(message)
