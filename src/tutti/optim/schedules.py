"""torch's learning-rate schedulers by name, fitted to the length of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tutti.errors import BadOption, UnknownName
from tutti.load_object import call_with_options, load_object, names_object, takes_option
from tutti.parts import CONSTANT, SCHEDULES, find_schedule

LENGTHS = ("total_steps", "T_max", "total_iters")
"""Options for the length of a schedule: by default the length of the run."""

RESTARTS = 3
"""The cycles of a run with warm restarts, unless the user sets the length of the first."""


def schedule(
    name: str, optimizer: Optimizer, updates: int, options: Mapping[str, Any] | None = None
) -> LRScheduler | None:
    """Build the scheduler called `name`, to be stepped after each update; None for a constant rate.

    One that follows the loss, ReduceLROnPlateau, is stepped after each epoch instead.

    Args:
        name: of a class of `torch.optim.lr_scheduler` in any spelling ("OneCycleLR", "one_cycle"); "cosine";
            "linear" (falls to 0, unlike torch's "LinearLR"); "linear_scaling" (warm-up to a larger rate);
            "warmup_cosine"; "warm" (three cosine cycles, each twice as long as the one before); "plateau";
            "constant" (no schedule); or `package.module:Class` or `file.py:Class`.
        optimizer: its rate is set. OneCycleLR takes the optimizer's rate for its peak.
        updates: the number of updates of the run, the default length of a schedule.
        options: its options by name. Where torch wants a function, `package.module:function` names one.

    Raises:
        UnknownName: there is no such scheduler, or it has no such option.
        BadOption: a value that it refuses, or a scheduler that cannot be used here.
    """
    given = dict(options or {})
    if not names_object(name) and find_schedule(name)[0] == CONSTANT:
        if given:
            raise UnknownName("option", next(iter(given)), [], of="the schedule 'constant'")
        return None
    scheduler_class, presets = _find(name)
    for key in ("optimizer", "last_epoch"):
        if key in given:
            raise BadOption(f"option '{key}' of schedule '{name}' is set by the run; leave it out")
    given = {key: _load_function(value, key) for key, value in given.items()}
    arguments = {**_lengths(scheduler_class, {**presets, **given}, updates), **presets, **given}
    if scheduler_class is lr_scheduler.OneCycleLR:
        arguments.setdefault("max_lr", [float(group["lr"]) for group in optimizer.param_groups])
    try:
        scheduler = call_with_options(scheduler_class, arguments, "schedule", name, {"optimizer": optimizer})
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadOption(
            f"schedule '{name}' cannot be made with {given} for {updates} updates: {error}"
        ) from error
    assert isinstance(scheduler, LRScheduler)
    return scheduler


def _find(name: str) -> tuple[type[LRScheduler], dict[str, Any]]:
    """Return the class called `name`, and the options that the name implies."""
    if names_object(name):
        scheduler_class = load_object(name, "schedule")
        if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, LRScheduler)):
            raise BadOption(f"schedule '{name}' is no class; expected a subclass of torch's LRScheduler")
        return scheduler_class, {}
    full, presets = find_schedule(name)
    return SCHEDULES[full], presets


def _lengths(scheduler_class: type[LRScheduler], given: Mapping[str, Any], updates: int) -> dict[str, int]:
    if "epochs" in given or "steps_per_epoch" in given:
        return {}
    lengths = {name: updates for name in LENGTHS if name not in given and takes_option(scheduler_class, name)}
    growth = given.get("T_mult", 1)
    if (
        scheduler_class is lr_scheduler.CosineAnnealingWarmRestarts
        and "T_0" not in given
        and isinstance(growth, int)
    ):
        lengths["T_0"] = -(-updates // max(1, sum(growth**cycle for cycle in range(RESTARTS))))
    return lengths


def _load_function(value: object, name: str) -> object:
    functions = isinstance(value, str) and names_object(value)
    return load_object(str(value), f"schedule's {name}") if functions else value
