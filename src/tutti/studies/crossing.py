"""The options of a study's runs: crossed with each other, shared by all, or refused. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from tutti.errors import BadOption
from tutti.launch.launcher import Launcher, started_by
from tutti.run.config import TrainConfig, flag

_LOST: Final = "a run that loses a rank fails, and the others go on"

OF_SINGLE_RUNS: Final = {
    "split": "the folds decide what is held out",
    "predictions": "each run writes the predictions it needs",
    "workers": "give --block",
    "hosts": "all runs are on this host",
    "out": "each run gets a folder in --out",
    "time_limit": "give --time-limit once, for all, or --job-timeout",
    "on_failure": _LOST,
    "hang_timeout": "give --job-timeout",
}
"""Options that the runs of a study cannot have, and what to do instead."""

SHARED: Final = {
    **OF_SINGLE_RUNS,
    "data": "all runs have one data set",
    "data_options": "all runs have one data set",
    "validation": "all runs are compared on the same samples",
    "test": "keep these samples out of the data",
    "seed": "give --seed once, for all",
    "threads": "give --threads once, for all",
}
"""Options that all runs of a study must share, and what to do instead."""


def refuse_launcher(study: str) -> None:
    """Refuse a study, such as "a plan", on ranks of mpirun or another launcher."""
    around = started_by()
    if around.launcher is not Launcher.ALONE:
        raise BadOption(f"{study} starts its ranks itself; run it without {around.launcher.value}")


def refuse_single_run(config: TrainConfig, *further: str) -> None:
    """Refuse the options that the runs of a study cannot have, and `further` ones."""
    for name in (*OF_SINGLE_RUNS, *further):
        if getattr(config, name) != getattr(TrainConfig, name):
            raise BadOption(f"{flag(name)} is for a single run: {SHARED[name]}")


def refuse_shared(name: str, option: str, further: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse "lr" or "model.hidden" as the name given to `option`, if all runs of a study must share it.

    `further` has names besides those in `SHARED`, with what to do instead.
    """
    part, dot, _ = name.partition(".")
    why = {**SHARED, **further}.get(f"{part}_options" if dot else part)
    if why is not None:
        raise BadOption(f"{option} {name}: {why}")


def crossed(sweep: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield each value of each option with each value of all others."""
    for values in itertools.product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def with_options(values: Mapping[str, Any], options: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of `values`, from `TrainConfig.as_json`, with some options changed.

    An option of a part has a name such as "strategy.every".
    """
    changed = dict(values)
    for name, value in options.items():
        part, dot, key = name.partition(".")
        if dot:
            changed[f"{part}_options"] = {**changed.get(f"{part}_options", {}), key: value}
        else:
            changed[name] = value
    return TrainConfig.from_json(changed)
