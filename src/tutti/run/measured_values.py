"""Values that a run leaves to a measurement before it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, cast

from tutti.load_object import load_object
from tutti.run.config import MEASURED, TrainConfig
from tutti.run.pickled import Pickled
from tutti.training.intervals import AUTO

MEASURE: Final = "tutti.studies.autotune.plan:measured"
"""It trains to measure, so it is made of runs as these are not of it: named, as the entries of jobs are."""

BUDGET_S: Final = 20.0
"""Seconds that measuring before a training may take."""

Measure = Callable[[TrainConfig, Collection[str], float, Mapping[str, Pickled], bool], TrainConfig]


def take_auto(options: dict[str, object]) -> set[str]:
    """Take the options that are "auto" out of `options`, and return their names."""
    asked = {name for name in MEASURED if options.get(name) == AUTO}
    for name in asked:
        del options[name]
    return asked


def with_measured(
    config: TrainConfig, asked: Collection[str], budget_s: float, objects: Mapping[str, Pickled], silent: bool
) -> TrainConfig:
    """Return the configuration with measured values of the fields that were left to that."""
    measure = cast("Measure", load_object(MEASURE, "measurement"))
    return measure(config, asked, budget_s, objects, silent)
