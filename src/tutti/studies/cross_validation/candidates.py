"""The candidates of a cross-validation: models x schedules x swept options, with names for their folders."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from tutti.errors import BadOption
from tutti.load_object import names_object
from tutti.run.config import TrainConfig
from tutti.run.pickled import Pickled
from tutti.studies.crossing import SHARED, crossed, refuse_single_run, with_options

NONE: Final = "none"
"""The name of no schedule."""

NOT_SWEPT: Final = {**SHARED, "model": "name several models", "schedule": "give --schedule several names"}
"""Options that are the same for all candidates, and what to do instead."""


@dataclass(frozen=True)
class Choice:
    """A model or a schedule.

    Attributes:
        name: in the names of candidates; a part of a path.
        values: of a configuration's fields.
        objects: what was given as a Python object, as in a `Job`.
    """

    name: str
    values: Mapping[str, Any]
    objects: Mapping[str, Pickled] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A candidate: what is trained on each fold.

    Attributes:
        config: without its split and its seed.
        objects: what was given as Python objects, as in a `Job`.
    """

    config: TrainConfig
    objects: dict[str, Pickled]


def choices_of(kind: str, names: Sequence[str]) -> list[Choice]:
    """Return the models or schedules of these names; "none" is no schedule.

    Args:
        kind: the field of a configuration, "model" or "schedule".
        names: as its option takes them. What is in a file or a package is called by its last name.

    Raises:
        BadOption: one is there twice, or two cannot be told apart by what they are called.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise BadOption(f"the {kind} '{name}' is named {count} times; name each once")
    if not names:
        raise BadOption(f"no {kind} is named; name at least one")
    called = [_called(name) for name in names]
    # Two files may each have a Net.
    called = [_called(name, called.count(short) > 1) for name, short in zip(names, called, strict=True)]
    refuse_alike(kind, names, called)
    found = []
    for name, short in zip(names, called, strict=True):
        nothing = kind == "schedule" and name == NONE
        found.append(Choice(short, {kind: None, "schedule_options": {}} if nothing else {kind: name}))
    return found


def refuse_alike(kind: str, names: Sequence[str], called: Sequence[str]) -> None:
    """Refuse models or schedules that cannot be told apart in the results.

    Args:
        kind: "model" or "schedule".
        names: as they were given.
        called: what they are called, one by one.

    Raises:
        BadOption: two are called the same.
    """
    for short, count in Counter(called).items():
        if count > 1:
            same = " and ".join(f"'{name}'" for name, own in zip(names, called, strict=True) if own == short)
            raise BadOption(f"the {kind}s {same} are both called '{short}' in the results; rename one")


def contenders(
    config: TrainConfig,
    models: Sequence[Choice],
    schedules: Sequence[Choice],
    sweep: Mapping[str, Sequence[Any]],
    objects: Mapping[str, Pickled] | None = None,
) -> dict[str, Contender]:
    """Return all candidates by name, such as "lenet/cosine/lr=0.01".

    Args:
        config: what they have in common.
        models: each with each schedule.
        schedules: each with each model.
        sweep: further options, each with the values that are crossed in.
        objects: those that they have in common.

    Raises:
        UserError: an option cannot be crossed in, is unknown, or has a value that cannot be used.
    """
    for name, values in sweep.items():
        if isinstance(values, str) or not len(values):
            raise BadOption(f"--sweep {name} is {values!r}; give a list of at least one value")
        part, dot, _ = name.partition(".")
        if (f"{part}_options" if dot else name) in NOT_SWEPT:
            raise BadOption(f"--sweep {name}: {NOT_SWEPT[part]}")
    found = {}
    for model, schedule, swept in itertools.product(models, schedules, crossed(sweep)):
        common = {**config.as_json(), **model.values, **schedule.values}
        name = "/".join([model.name, schedule.name, *_swept(swept)])
        given = {**(objects or {}), **model.objects, **schedule.objects}
        if name in found:
            raise BadOption(f"two candidates would be called '{name}'; give --sweep each value once")
        found[name] = Contender(with_options(common, swept), given)
    return found


def refuse_own_folds(config: TrainConfig) -> None:
    """Refuse options by which a run says itself what is held out, or where it goes.

    Raises:
        BadOption: one is given.
    """
    refuse_single_run(config)
    if config.validation != TrainConfig.validation:
        raise BadOption("--validation is for a single run: the folds say what is held out")


def plain(text: str) -> str:
    """Return a text as a part of a path."""
    return re.sub(r"[^A-Za-z0-9_=+,@.-]+", "-", text).lstrip(".") or "-"


def _called(name: str, long: bool = False) -> str:
    if not names_object(name):
        return plain(name)
    where, _, last = name.rpartition(":")
    stem = PurePath(where).stem if where.endswith(".py") else where
    return plain(f"{stem}.{last}" if long else last)


def _swept(options: Mapping[str, Any]) -> Iterator[str]:
    if options:
        yield plain(",".join(f"{key}={value}" for key, value in options.items()))
