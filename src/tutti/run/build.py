"""From a configuration to the parts of a run: data, model, optimizer, strategy. Runs on every rank."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from tutti import models, optim, strategies
from tutti.comm.base import Communicator
from tutti.data import Batches, DataSet, Part, Queue, open_data
from tutti.errors import BadOption, UnknownName, refuse_other
from tutti.load_object import call_with_options
from tutti.run.config import Options, TrainConfig
from tutti.run.jobs import Job
from tutti.run.pickled_arguments import named_or_given
from tutti.strategies import Strategy
from tutti.strategies.base import Pace
from tutti.training.balance import SpeedBalance


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global random generator, and put the caller's states back afterwards."""
    states = random.getstate(), np.random.get_state()
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count()) if begun else ()
    with torch.random.fork_rng(devices=gpus):
        reseed(seed, 0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def default_floats(name: str | None) -> Iterator[None]:
    """Make `name` torch's default type of floats meanwhile; None: leave it as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if name is None else getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reseed(seed: int, rank: int) -> None:
    """Seed every global random generator, for each rank differently (dropout must differ between ranks)."""
    mixed = [int(word) for word in np.random.SeedSequence((seed, rank)).generate_state(3, np.uint32)]
    random.seed(mixed[0])
    np.random.seed(mixed[1])
    torch.manual_seed(mixed[2])


def open_config_data(job: Job, comm: Communicator) -> DataSet:
    """The data set of the configuration (collective); only one rank of each host reads it."""
    config, options = job.config, job.config.data_options
    given = named_or_given(job, "data") if comm.node.rank == 0 else None
    if callable(given) and not isinstance(given, Dataset):
        given, options = call_with_options(given, options, "data set", config.data), {}
    return open_data(given, comm, config.validation, config.seed, options)


def outputs_for(dataset: DataSet) -> int:
    """Count the outputs that a model needs: one for each class, or for each number of a target."""
    return dataset.classes or max(1, math.prod(dataset.train.targets.shape[1:]))


def build_model(job: Job, dataset: DataSet) -> nn.Module:
    """The model of the configuration, with its initial weights.

    Raises:
        UnknownName, BadOption, BadModel: there is none of this name, or it cannot be built.
    """
    given = named_or_given(job, "model")
    reseed(job.config.seed, 0)
    return models.build(given, dataset.shape, outputs_for(dataset), job.config.model_options)


def build_optimizer(job: Job, module: nn.Module) -> Optimizer:
    """The optimizer of the configuration over the module's trainable parameters.

    Raises:
        UnknownName, BadOption: there is none of this name, or its options are wrong.
    """
    config, given = job.config, named_or_given(job, "optimizer")
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if isinstance(given, str):
        return optim.build(given, parameters, config.lr, config.optimizer_options)
    options: Options = dict(config.optimizer_options)
    if isinstance(given, type):
        options |= {} if config.lr is None else {"lr": config.lr}
    elif config.lr is not None or options:
        raise BadOption("the optimizer is made by a function of yours: set lr and its other options there")
    optimizer = given(parameters, **options)
    if not isinstance(optimizer, Optimizer):
        raise BadOption(
            f"optimizer '{config.optimizer}' made a {type(optimizer).__name__}; "
            f"it must return a torch.optim.Optimizer"
        )
    return optimizer


def build_schedule(job: Job, optimizer: Optimizer, updates: int) -> LRScheduler | None:
    """The learning-rate schedule of the configuration, stepped after each of so many updates."""
    given, options = named_or_given(job, "schedule"), job.config.schedule_options
    if given is None:
        if options:
            raise BadOption(f"schedule options are given ({', '.join(options)}), but no --schedule; name one")
        return None
    if isinstance(given, str):
        return optim.schedule(given, optimizer, updates, options)
    schedule = given(optimizer, **options)
    if not hasattr(schedule, "step"):
        raise BadOption(
            f"schedule '{job.config.schedule}' made a {type(schedule).__name__}; it must return a scheduler "
            "of torch.optim.lr_scheduler"
        )
    return cast("LRScheduler", schedule)


def build_strategy(job: Job, workers: int, hosts: int = 1, servers: int = 0) -> Strategy:
    """The strategy of the configuration; "auto" is solo for one worker, else sync.

    Args:
        job: what is to be done.
        workers: how many ranks train.
        hosts: on how many hosts they are.
        servers: how many further ranks there are for a parameter centre.

    Raises:
        UnknownName: there is no such strategy, or it has no such hyper-parameter.
        BadOption: the strategy cannot use this world.
    """
    given = named_or_given(job, "strategy")
    refuse_other(given, Strategy | str, "strategy", "tutti.Sync(), or a name")
    if not isinstance(given, Strategy):
        kind = strategies.named(("solo" if workers == 1 else "sync") if given == "auto" else given)
        known = [f.name for f in fields(kind)]
        for key in job.config.strategy_options:
            if key not in known:
                raise UnknownName("option", key, known, of=f"the strategy '{kind.name}'")
        given = kind(**job.config.strategy_options)
    given.check(workers, hosts, servers, job.config.levels)
    return given


def deal(
    config: TrainConfig, strategy: Strategy, part: Part, comm: Communicator
) -> tuple[Batches, SpeedBalance | None]:
    """Deal this rank its batches, with what keeps them balanced, as the configuration says (collective)."""
    own = strategy.pace is not Pace.TOGETHER
    size = config.batch_size
    batches = Batches(part, size, comm.rank, comm.size, strategy.passes, config.seed, own=own)
    if config.balance == "queue":
        return Queue(batches, comm.counter().add), None
    return batches, SpeedBalance(batches, comm) if config.balance == "speed" else None
