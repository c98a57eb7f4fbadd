"""The checks that need no data: names, options and strategy. Runs on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import torch
from torch import nn

from tutti import optim
from tutti.data.batches import check_split
from tutti.errors import BadOption
from tutti.load_object import names_object
from tutti.parameter_server.base import Centre
from tutti.run.build import build_strategy
from tutti.run.config import TrainConfig
from tutti.run.jobs import Recipe, layout_of
from tutti.run.names import check_names
from tutti.run.optimization import own_rate
from tutti.strategies import STRATEGIES, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred
from tutti.training.intervals import AUTO
from tutti.training.losses import LOSSES, with_options
from tutti.training.losses.weights import given_weights

_PACES: Final = {
    ("balance", "speed"): Pace.TOGETHER,
    ("balance", "queue"): Pace.FREE,
    ("validate", "background"): Pace.FREE,
}
"""The pace of workers that the value of an option needs; other values go with any."""

_WORKERS: Final = {
    Pace.TOGETHER: "make each update together, from one batch",
    Pace.ABREAST: "make every step at the same time, each from its batches",
    Pace.FREE: "train on batches of their own, and do not wait",
}
"""The behaviour of workers by their pace."""


def check_recipe(recipe: Recipe, ranks: int, hosts: int = 1, compared: bool = False) -> Strategy:
    """Check names and options, which needs no data, and return the strategy. Servers count as ranks."""
    config = recipe.config
    check_names(recipe)
    _check_values(config, recipe.objects)
    if config.lr == AUTO:
        own_rate(recipe)
    layout = layout_of(config, ranks)
    workers = ranks - config.servers if layout is None else layout.data
    strategy = build_strategy(recipe, workers, hosts, config.servers)
    for message in refused_strategy(strategy, config, compared):
        raise BadOption(message)
    if strategy.pace is Pace.TOGETHER:
        check_split(config.batch_size, workers)
    return strategy


def refused_strategy(strategy: Strategy, c: TrainConfig, compared: bool = False) -> Iterator[str]:
    """Yield why options of a run do not fit its strategy."""
    name, pace = f"strategy '{strategy.name}'", strategy.pace
    if c.accumulate > 1 and strategy.passes > 1:
        yield f"--accumulate {c.accumulate} does not go with --strategy.every {strategy.passes}; give one"
    if compared and pace is not Pace.TOGETHER:
        yield (
            f"{name} gives every worker other batches, so it does not follow sequential training; "
            "compare one that makes each update together, such as '--strategy sync'"
        )
    for (option, value), needed in () if compared else _PACES.items():
        if getattr(c, option) == value and needed is not pace:
            fit = ", ".join(sorted(name for name, kind in STRATEGIES.items() if kind.pace is needed))
            yield (
                f"--{option} {value} is for strategies whose workers {_WORKERS[needed]} ({fit}), but those "
                f"of '{strategy.name}' {_WORKERS[pace]}; leave --{option} out"
            )
    if compared and c.lr == AUTO:
        yield "--lr auto tests a whole run, and this compares single steps; give a number"
    if c.parallel is not None and pace is not Pace.TOGETHER:
        yield f"--parallel needs workers that {_WORKERS[Pace.TOGETHER]}, unlike {name}; use --strategy sync"
    if c.servers > 0 and not isinstance(strategy, Centred):
        yield (
            f"{name} cannot run on servers: only strategies derived from tutti.strategies.centred.Centred "
            "say what a server does; leave --servers out"
        )
    if c.device != "cpu" and Centre in strategy.needs:
        yield (
            f"{name} keeps its centre in the CPU's memory, and --device is '{c.device}'; use --strategy solo "
            "there, or --device cpu"
        )


def _check_values(config: TrainConfig, objects: Collection[str]) -> None:
    """Refuse values that parts would refuse when they are made."""
    loss, optimizer = config.loss, config.optimizer
    if "loss" not in objects and loss in LOSSES:
        with_options(LOSSES[loss], config.loss_options)
    if "optimizer" not in objects and not names_object(optimizer):
        # Some optimizers take only matrices.
        matrix = nn.Parameter(torch.zeros(2, 2))
        optim.build(optimizer, [matrix], config.rate, config.optimizer_options)
    if config.class_weights is not None:
        given_weights(config.class_weights)
