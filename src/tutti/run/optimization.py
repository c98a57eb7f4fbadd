"""The optimizer and the learning-rate schedule of a run, from its configuration."""

from __future__ import annotations

import inspect
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tutti import optim
from tutti.errors import BadOption
from tutti.optim.named import optimizer_class
from tutti.optim.optimizers.muon import Muon
from tutti.optim.sharded import announce
from tutti.optim.without_compiler import defer_compiler
from tutti.run.config import Options
from tutti.run.jobs import Recipe
from tutti.state import Saved, Values
from tutti.training.run_parts import Schedule

OF_SCHEDULES: Final = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "base_momentum", "max_momentum"}
)
"""Options of param groups that a learning-rate schedule sets."""

defer_compiler()


OWN_RATES: Final = (torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers that determine the size of their updates; their rate is a factor, a bound, or a start."""


def own_rate(recipe: Recipe) -> float:
    """Return the default rate of an optimizer; BadOption if a range test cannot pick another."""
    given = recipe.given("optimizer")
    kind = optimizer_class(given) if isinstance(given, str) else given
    if not isinstance(kind, type):
        raise BadOption("the optimizer is made by your function: set lr there, and leave lr='auto' out")
    if issubclass(kind, OWN_RATES):
        raise BadOption(
            f"--lr auto means nothing for optimizer {kind.__name__}, which finds the size of each update "
            "itself; leave --lr out, or use another one, such as --optimizer adam"
        )
    parameter = inspect.signature(kind).parameters.get("lr")
    if parameter is None or not isinstance(parameter.default, float):
        raise BadOption(
            f"optimizer {kind.__name__} has no 'lr' with a default, around which --lr auto would look; give "
            "its options as numbers"
        )
    return parameter.default


def build_optimizer(recipe: Recipe, module: nn.Module) -> Optimizer:
    """Build the optimizer of the configuration over the module's trainable parameters."""
    config, given = recipe.config, recipe.given("optimizer")
    kind = optimizer_class(given) if isinstance(given, str) else given
    parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if isinstance(kind, type) and issubclass(kind, Muon):
        if config.parallel is not None:
            raise BadOption("optimizer Muon needs the whole model on every rank; leave --parallel out")
        parameters = kind.groups(module)
    if isinstance(given, str):
        return optim.build(given, parameters, config.rate, config.optimizer_options)
    options: Options = dict(config.optimizer_options)
    theirs = "the optimizer is made by your function: set lr and its other options there"
    if isinstance(given, type):
        options |= {} if config.rate is None else {"lr": config.rate}
    elif options:
        raise BadOption(theirs)
    optimizer = given(parameters, **options)
    if not isinstance(optimizer, Optimizer):
        raise BadOption(
            f"optimizer '{config.optimizer}' made a {type(optimizer).__name__}; "
            f"it must return a torch.optim.Optimizer"
        )
    # The configuration of an earlier run has the learning rate that the function has set.
    if not isinstance(given, type) and config.rate not in (None, optimizer.param_groups[0]["lr"]):
        raise BadOption(theirs)
    return optimizer


def build_schedule(
    recipe: Recipe, optimizer: Optimizer, updates: int, compared: bool = False
) -> LRScheduler | None:
    """Build the learning-rate schedule of the configuration, which is stepped after each update."""
    given, config = recipe.given("schedule"), recipe.config
    if given is None:
        return None
    schedule = (
        optim.schedule(given, optimizer, updates, config.schedule_options)
        if isinstance(given, str)
        else given(optimizer, **config.schedule_options)
    )
    if schedule is None and isinstance(given, str):
        return None
    if not hasattr(schedule, "step"):
        raise BadOption(
            f"schedule '{config.schedule}' made a {type(schedule).__name__}; it must return a scheduler of "
            "torch.optim.lr_scheduler"
        )
    if isinstance(schedule, ReduceLROnPlateau) and (compared or config.validate != "pause"):
        raise BadOption(
            "schedule ReduceLROnPlateau needs the loss of each epoch before the next one begins: use "
            "--validate pause, and no command that compares single steps"
        )
    return cast("LRScheduler", schedule)


def load_optimizer(
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    module: nn.Module,
    saved: Saved,
    length: Schedule,
    foreign: bool = False,
) -> int:
    """Load the optimizer state of a checkpoint; return the number of steps of its schedule made here."""
    training = saved.part("training")
    schedule = (training.own or training.shared)["schedule"]
    options: list[Values] = schedule["options"]
    stepped = 0
    fits = length.has_length_of(training.shared) and schedule["state"] is not None
    # The rate of ReduceLROnPlateau comes from the losses so far; steps would not repeat it.
    if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau) and not fits:
        # As far as is certain now: the trainer makes the other steps once it knows the batches.
        begun = training.shared["epoch"] * length.batches.updates
        stepped = min(schedule["made"], max(1, begun), length.updates)
        announce(optimizer)
        for _ in range(stepped):
            scheduler.step()
        options = [
            {name: value for name, value in group.items() if name not in OF_SCHEDULES} for group in options
        ]
    names = {parameter: name for name, parameter in module.named_parameters()}
    optim.state.load(optimizer, names, saved, options, copy=foreign)
    return stepped
