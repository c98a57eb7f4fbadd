"""The checks of a job that need neither its ranks nor its data: names, options, and the number of ranks.

The launching process makes them first, if it has torch. The ranks make them too: where an MPI launcher
started them, nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from tutti import models, optim
from tutti.batch_last import BATCH_LAST, REAL_TYPES
from tutti.batch_last.compiler import kernels
from tutti.data import DataSet
from tutti.data.batches import check_split
from tutti.data.sources import check_named
from tutti.errors import BadOption
from tutti.load_object import names_object
from tutti.optim.schedules import check_schedule
from tutti.parameter_server.base import Centre
from tutti.run.build import build_strategy
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job, layout_of
from tutti.strategies import STRATEGIES, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred
from tutti.training.losses import LOSSES, with_options
from tutti.training.losses.weights import given_weights
from tutti.training.metrics import better_of_names, check_metrics
from tutti.training.stopping import Ending, Monitor

PACES: Final[dict[str, dict[str, Pace]]] = {
    "balance": {"speed": Pace.TOGETHER, "queue": Pace.FREE},
    "validate": {"distributed": Pace.FREE, "background": Pace.FREE},
}
"""The pace of workers that the values of an option need; others go with any."""

REMEDIES: Final[dict[str, dict[Pace, str]]] = {
    "balance": {
        Pace.TOGETHER: "--balance speed",
        Pace.ABREAST: "--balance none",
        Pace.FREE: "--balance queue",
    },
    "validate": dict.fromkeys(Pace, "--validate pause"),
}
"""The value of an option that goes with a pace."""

WORKERS: Final = {
    Pace.TOGETHER: "make each update together, from one batch",
    Pace.ABREAST: "have batches of their own and make every step at the same time",
    Pace.FREE: "have batches of their own and wait for nobody",
}
"""The workers of a pace, in words."""


def check_job(job: Job, ranks: int, hosts: int = 1) -> None:
    """Refuse what no rank and no data could mend.

    Args:
        job: what is to be done.
        ranks: how many there are to be, servers included.
        hosts: on how many hosts.

    Raises:
        UserError: a name or an option is wrong, or the job does not fit these ranks.
    """
    check_names(job)
    if job.trains:
        if job.config.layout == BATCH_LAST:
            # Compiled here once: the ranks would all begin to.
            kernels(REAL_TYPES[job.config.precision])
        check_strategy(job, ranks, hosts)


def check_strategy(job: Job, ranks: int, hosts: int) -> Strategy:
    """Return the strategy of a job, which fits its ranks and its other options.

    Args:
        job: what is to be done.
        ranks: how many there are, servers included.
        hosts: on how many hosts.

    Raises:
        UnknownName: there is no such strategy, or it has no such hyper-parameter.
        BadOption: it cannot use these ranks or an option, or the batch has fewer samples than they are.
    """
    config = job.config
    layout = layout_of(config, ranks)
    workers = ranks - config.servers if layout is None else layout.data
    strategy = build_strategy(job, workers, hosts, config.servers)
    for message in refused_strategy(strategy, config, job.compared):
        raise BadOption(message)
    if strategy.pace is Pace.TOGETHER:
        check_split(config.batch_size, workers)
    return strategy


def check_predictions(config: TrainConfig, dataset: DataSet) -> None:
    """Refuse to keep predictions of a part that there is not.

    Raises:
        BadOption: they are asked for.
    """
    if config.predictions and dataset.validation is None:
        raise BadOption(
            "--predictions is for the validation part, and there is none; give --validation a share, or "
            "--split"
        )


def refused_strategy(strategy: Strategy, c: TrainConfig, compared: bool = False) -> Iterator[str]:
    """Describe what of a run does not go with its strategy.

    Args:
        strategy: of the workers.
        c: the configuration of the run.
        compared: the run is compared with that of one process.
    """
    name, together = f"'{strategy.name}'", strategy.pace is Pace.TOGETHER
    if c.accumulate > 1 and strategy.passes > 1:
        yield (
            f"--accumulate {c.accumulate} and --strategy.every {strategy.passes} both say in how many passes "
            f"{name} computes an update; give one of them"
        )
    if compared and not together:
        yield (
            f"strategy {name} gives every worker batches of its own, so it does not follow sequential "
            "training; compare one that makes each update together, such as '--strategy sync'"
        )
    for option in () if compared else ("balance", "validate"):
        needed = PACES[option].get(getattr(c, option), strategy.pace)
        if needed != strategy.pace:
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


def _unfit(strategy: Strategy, config: TrainConfig, option: str, needed: Pace) -> str:
    pace, whole = strategy.pace, config.parallel is None
    fit = ", ".join(sorted(name for name, kind in STRATEGIES.items() if kind.pace == needed))
    given = f"'{strategy.name}'" if whole else f"--parallel {config.parallel}"
    return (
        f"--{option} {getattr(config, option)} is for strategies whose workers {WORKERS[needed]} "
        f"({fit}), but those of {given} {WORKERS[pace]}; use {REMEDIES[option][pace]}"
        f"{', or such a strategy' if whole else ''}"
    )


def check_names(job: Job) -> None:
    """Refuse names that stand for nothing. What names an object of the user's is not loaded.

    Raises:
        UnknownName: a name, or an option of the optimizer, is unknown.
        BadOption: an option of the optimizer has a value that it refuses.
    """
    config = job.config
    if config.hosts is None and "data" not in job.objects and not names_object(config.data):
        # Other hosts have files of their own.
        check_named(config.data)
    for field, check in (
        ("model", models.MODELS.check),
        ("loss", _check_loss),
        ("metrics", check_metrics),
        ("schedule", check_schedule),
    ):
        name = getattr(config, field)
        if name is not None and field not in job.objects:
            words = name.split(",") if field == "metrics" else [name]
            for word in (one for one in map(str.strip, words) if not names_object(one)):
                check(word)
    _check_loss_options(job)
    if "metrics" not in job.objects and (better := better_of_names(config.metrics)) is not None:
        # Whether there is a validation part shows when there are samples.
        Ending(Monitor.parse(config.monitor, better, validated=True), target=config.target)
    if "optimizer" not in job.objects and not names_object(config.optimizer):
        # An optimizer checks its options when it is made; some take matrices alone.
        matrix = nn.Parameter(torch.zeros(2, 2))
        optim.build(config.optimizer, [matrix], config.lr, config.optimizer_options)


def _check_loss(name: str) -> None:
    if name != "auto":
        LOSSES.check(name)


def _check_loss_options(job: Job) -> None:
    config = job.config
    if config.class_weights is not None:
        given_weights(config.class_weights)
    if config.loss in LOSSES and "loss" not in job.objects:
        with_options(LOSSES[config.loss], config.loss_options)
