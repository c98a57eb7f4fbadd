"""Options crossed with each other: each value of one with each value of all others. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tutti.run.config import TrainConfig


def crossed(sweep: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield each value of each option with each value of all others."""
    for values in itertools.product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def with_options(values: Mapping[str, Any], options: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with some other options.

    Args:
        values: of the configuration, as `TrainConfig.as_json` gives them.
        options: by field; an option of a part is given as "strategy.every".

    Raises:
        UserError: an option is unknown, or its value cannot be used.
    """
    found = dict(values)
    for name, value in options.items():
        part, dot, key = name.partition(".")
        if dot:
            found[f"{part}_options"] = {**found.get(f"{part}_options", {}), key: value}
        else:
            found[name] = value
    return TrainConfig.from_json(found)
