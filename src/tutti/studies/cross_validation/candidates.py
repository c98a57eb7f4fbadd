"""The candidates of a cross-validation: models x schedules x swept options, by name."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from tutti.errors import BadOption
from tutti.farm.jobs import FarmJob
from tutti.load_object import names_object
from tutti.run.config import OBJECT, TrainConfig, with_defaults
from tutti.run.pickled import Pickled
from tutti.studies.crossing import crossed, refuse_shared, with_options

NONE: Final = "none"
"""The name of the alternative without a schedule."""

NAMED: Final = {"model": "name several models", "schedule": "name several schedules"}
"""Options that cannot be swept, and what to do instead."""


@dataclass(frozen=True)
class Alternative:
    """A model or a schedule."""

    name: str  # a part of a path
    values: Mapping[str, Any]  # fields of a configuration
    objects: Mapping[str, Pickled]  # Python objects, as in a `Job`


def alternatives(kind: str, given: Sequence[tuple[str | None, object]]) -> list[Alternative]:
    """Return models or schedules from pairs of a name and a value; None stands for the model's schedule.

    Without a name, the last part of a path or package is the name, or that of the class or function.
    """
    if not given:
        raise BadOption(f"no {kind} is named; name at least one")
    shorts = Counter(_called(one) for _, one in given if isinstance(one, str))
    found = []
    for name, one in given:
        values: dict[str, Any]
        objects: Mapping[str, Pickled] = {}
        if one is None:
            values, short = {kind: None, "schedule_options": {}}, NONE
        elif isinstance(one, str):
            # Two files may both have a Net.
            values, short = {kind: one}, _called(one, shorts[_called(one)] > 1)
        else:
            from tutti.run.pickled_arguments import by_name  # Imports torch.

            values, objects = by_name({kind: one})
            short = values[kind].removeprefix(OBJECT).rpartition(":")[2].rpartition(".")[2]
        found.append(Alternative(plain(short if name is None else str(name)), values, objects))
    for name, count in Counter(one.name for one in found).items():
        if count > 1:
            raise BadOption(f"{count} {kind}s have the name '{name}'; name each once, or rename one")
    return found


def candidates_of(
    base: FarmJob,
    models: Sequence[Alternative],
    schedules: Sequence[Alternative],
    sweep: Mapping[str, Sequence[Any]],
) -> dict[str, FarmJob]:
    """Return all candidates by name, such as "lenet/cosine/lr=0.01"."""
    for name, values in sweep.items():
        if isinstance(values, str) or not len(values):
            raise BadOption(f"--sweep {name} is {values!r}; give a list of at least one value")
        refuse_shared(name, "--sweep", NAMED)
    candidates = {}
    for model, schedule, swept in itertools.product(models, schedules, crossed(sweep)):
        common = {**base.config.as_json(), **model.values, **schedule.values}
        given = {field: one for field, one in common.items() if one != getattr(TrainConfig, field, {})}
        common |= with_defaults(given)
        by_default = schedule.values.get("schedule", NONE) is None and common["schedule"]
        name = "/".join([model.name, by_default or schedule.name, *_swept(swept)])
        if name in candidates:
            raise BadOption(f"two candidates would have the name '{name}'; give --sweep each value once")
        objects = {**base.objects, **model.objects, **schedule.objects}
        candidates[name] = FarmJob(name, with_options(common, swept), objects)
    return candidates


def servers_of(candidates: Mapping[str, FarmJob]) -> int:
    """Return the number of ranks of a block that are servers in all candidates."""
    return min(one.config.servers for one in candidates.values())


def plain(text: str) -> str:
    """Return a text as a part of a path."""
    return re.sub(r"[^A-Za-z0-9_=+,@.-]+", "-", text).lstrip(".") or "-"


def _called(name: str, long: bool = False) -> str:
    if not names_object(name):
        return name
    where, _, last = name.rpartition(":")
    stem = PurePath(where).stem if where.endswith(".py") else where
    return f"{stem}.{last}" if long else last


def _swept(options: Mapping[str, Any]) -> Iterator[str]:
    if options:
        yield plain(",".join(f"{key}={value}" for key, value in options.items()))
