"""`tutti.simulate`: a simulation from a script or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

from torch import nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.run.api import TrainOptions, refuse_built, refuse_unknown, spell, weights_of, without_loaders
from tutti.run.arguments import as_arguments
from tutti.run.config import OBJECT, TrainConfig, with_defaults
from tutti.run.pickled_arguments import by_name
from tutti.run.start import run
from tutti.strategies import Strategy
from tutti.studies.simulate.machine import Machine, machine_of
from tutti.studies.simulate.question import DECIDED, SimulateJob, SimulateQuestion, Way
from tutti.studies.simulate.result import Simulation


@as_arguments()
def simulate(
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    data: object = "digits",
    *,
    strategies: Sequence[str | Strategy] = ("sync", "easgd", "diloco"),
    workers: Sequence[int] = (1, 8),
    network: str | None = None,
    machine: str | Machine | None = None,
    price: float | None = None,
    scaling: str = "weak",
    timing: bool = False,
    optimizer: str | Callable[..., Optimizer] | None = None,
    schedule: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., Any] = "auto",
    metrics: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = "auto",
    sampling: object = None,
    augment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    quiet: bool = False,
    **options: Unpack[TrainOptions],
) -> Simulation:
    """Simulate a training on other hosts: its speed, cost and accuracy.

    Args:
        model: as for `tutti.train`.
        data: as for `tutti.train`.
        strategies: names, such as "sync" or "diloco:every=100", or strategies of tutti.
        workers: numbers of workers, each with each strategy.
        network: between hosts, such as "10gbit,50us"; by default the network of the machine.
        machine: a name, the path of a TOML file, or a `Machine`; by default hosts like this one.
        price: of a host for an hour; by default the price of the machine.
        scaling: "weak": `batch_size` is that of each worker; "strong": of all workers together.
        timing: simulate the time alone, without gradients: thousands of workers are cheap.
        optimizer: as `tutti.train` takes it, like the five below.
        schedule: likewise.
        loss: likewise.
        metrics: likewise.
        sampling: likewise.
        augment: likewise.
        quiet: print nothing.
        **options: as for `tutti.train`. `epochs` are the same samples for any number of workers, `steps` are
            those of each worker.

    Returns:
        The rows of the table; `stops()` says where each strategy stops paying.

    Raises:
        UserError: an argument is wrong; the message says which and what to do.

    Example:
        >>> found = tutti.simulate("mlp", "mnist", workers=[1, 8, 64], network="1gbit,50us", timing=True)
        >>> print(found.stops())
    """
    known = [name for name in TrainOptions.__annotations__ if name not in DECIDED]
    refuse_unknown(options, known, "simulate")
    data = without_loaders(data, options, quiet)
    spell(options)
    refuse_built(optimizer)
    given: dict[str, object] = {"optimizer": optimizer, "schedule": schedule, "loss": loss}
    given |= {"metrics": metrics, "sampling": weights_of(sampling), "augment": augment}
    chosen = {name: one for name, one in given.items() if one is not None}
    values, objects = by_name({"model": model, "data": data, **chosen})
    config = TrainConfig.from_json(with_defaults({**values, **options}))
    if timing and config.optimizer.startswith(OBJECT):
        raise BadOption("timing=True knows optimizers by name or class; give one of these")
    question = SimulateQuestion(
        _told_apart([_way_of(one) for one in strategies]),
        list(workers),
        machine_of(machine, network, price),
        scaling,
        timing,
    )
    found = cast("Simulation", run(SimulateJob(config, question, objects=objects, quiet=quiet)))
    if not quiet:
        found.show(sys.stdout)
    return found


def _way_of(given: str | Strategy) -> Way:
    if isinstance(given, str):
        return Way.parse(given)
    named, objects = by_name({"strategy": given})
    if objects:
        raise BadOption(f"the strategy {given!r:.80} is none of tutti's; give its class as 'file.py:Class'")
    options = {f"strategy.{key}": value for key, value in named["strategy_options"].items()}
    return Way(given.name, given.name, options)


def _told_apart(ways: Sequence[Way]) -> list[Way]:
    """Add to a name that several ways have the options in which they differ."""
    found = []
    for way in ways:
        others = [one.options for one in ways if one.name == way.name]
        own = {
            key: value for key, value in way.options.items() if any(one.get(key) != value for one in others)
        }
        words = [f"{key.removeprefix('strategy.')}={value}" for key, value in own.items()]
        found.append(replace(way, name=":".join([way.name, *words])))
    return found
