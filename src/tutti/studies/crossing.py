"""The options of a study's runs: which can be crossed, and which need a single run. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from tutti.errors import BadOption
from tutti.run.config import TrainConfig, flag

_LOST: Final = "a run whose rank is lost fails alone, and the others go on"

OF_SINGLE_RUNS: Final = {
    "split": "the folds say what is held out",
    "predictions": "each run writes what is needed",
    "workers": "give --block",
    "hosts": "the farm is on this host",
    "out": "each run gets its folder in --out",
    "time_limit": "give --time-limit once, for all, or --job-timeout",
    "on_failure": _LOST,
    "hang_timeout": "give --job-timeout",
}
"""Options that the runs of a study cannot have, and what to do instead."""

SHARED: Final = {
    **OF_SINGLE_RUNS,
    "data": "all runs are of one data set",
    "data_options": "all runs are of one data set",
    "validation": "all runs are compared by the same samples",
    "test": "keep these samples out of the data",
    "seed": "give --seed once, for all",
    "threads": "give --threads once, for all",
}
"""Options that all runs of a study must share, and what to do instead."""


def refuse_single_run(config: TrainConfig, *further: str) -> None:
    """Refuse the options that the runs of a study cannot have, and `further` ones."""
    for name in (*OF_SINGLE_RUNS, *further):
        if getattr(config, name) != getattr(TrainConfig, name):
            raise BadOption(f"{flag(name)} is for a single run: {SHARED[name]}")


def refuse_shared(name: str, option: str, further: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse an option, such as "lr" or "model.hidden", that all runs of a study must share.

    `option` is what gave it, and `further` are options besides `SHARED`, with what to do instead.
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
    """Return a configuration with some options changed.

    `values` are as `TrainConfig.as_json` gives them. An option of a part is given as "strategy.every".
    """
    changed = dict(values)
    for name, value in options.items():
        part, dot, key = name.partition(".")
        if dot:
            changed[f"{part}_options"] = {**changed.get(f"{part}_options", {}), key: value}
        else:
            changed[name] = value
    return TrainConfig.from_json(changed)
