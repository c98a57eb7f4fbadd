"""The space of a search: options and their values, as Optuna's distributions.

log:1e-4..1e-1        a number, each order of magnitude equally likely
0.1..0.9              a number
16..256               a whole number; also log:16..256
64,128,256            one of these; in a file, or as JSON, a list of any values: [[64], [128, 64]]

The values of a list are JSON texts in Optuna's study, which has no lists and confuses 1 and true.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Final

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tutti.errors import BadOption
from tutti.records.json_lines import Json, to_json
from tutti.run.config import TrainConfig, type_name
from tutti.studies.crossing import refuse_shared, with_options

FORMS: Final = "give log:1e-4..1e-1, 0.1..0.9, 16..256, or values with commas, such as 64,128,256"

_RANGE: Final = re.compile(r"\s*(log:)?\s*([^:]*?)\s*\.\.\s*([^:]*?)\s*")
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")

_FRACTIONS: Final = tuple(f.name for f in fields(TrainConfig) if type_name(f) == "float")
"""Options with fractional values, even between whole numbers."""


@dataclass(frozen=True)
class Space:
    """The options to search, by name, such as "lr", or "model.hidden" for an option of a part."""

    written: Json  # as given, as JSON values
    distributions: Mapping[str, BaseDistribution]  # the same for Optuna

    def options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a run for Optuna's parameters."""
        return {
            name: json.loads(value) if self.is_choice(name) else value for name, value in parameters.items()
        }

    def is_choice(self, name: str) -> bool:
        """Return whether an option has a list of values."""
        return isinstance(self.distributions[name], CategoricalDistribution)

    def ends(self, name: str) -> list[Any]:
        """Return the values to check: the ends of a range, or all choices."""
        one = self.distributions[name]
        if isinstance(one, CategoricalDistribution):
            return [json.loads(str(text)) for text in one.choices]
        assert isinstance(one, IntDistribution | FloatDistribution)
        return [one.low, one.high]

    def points(self) -> list[dict[str, Any]]:
        """Return all combinations of the lists as Optuna's parameters, the last changing fastest."""
        choices = {
            name: one.choices
            for name, one in self.distributions.items()
            if isinstance(one, CategoricalDistribution)
        }
        return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]

    def check(self, base: TrainConfig) -> None:
        """Refuse a space with an unusable value, for trials with the options of `base`."""
        for name in self.distributions:
            refuse_shared(name, "--space")
            for value in self.ends(name):
                with_options(base.as_json(), {name: value})


def space_of(given: Mapping[str, Any]) -> Space:
    """Parse a space."""
    if not given:
        raise BadOption("the space is empty; give --space.lr log:1e-4..1e-1 or the like, or --space FILE")
    written = {name.replace("-", "_"): one for name, one in given.items()}
    return Space(written, {name: _distribution(name, one) for name, one in written.items()})


def read_space(path: str | Path) -> dict[str, Any]:
    """Read a TOML file with lines such as lr = "log:1e-4..1e-1" and model.hidden = [64, 128]."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOption(f"cannot read the space '{path}': {error.strerror}; name a TOML file") from error
    except ValueError as error:
        raise BadOption(f"the space '{path}' is no TOML: {error}") from error
    return dict(_flat(values))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _flat(value))
        else:
            yield name, value


def _distribution(name: str, given: object) -> BaseDistribution:
    try:
        if isinstance(given, list | tuple):
            texts = [to_json(value) for value in given]
            if len(texts) < 2 or len({*texts}) < len(texts):
                raise ValueError("give at least two values, each once")
            return CategoricalDistribution(texts)
        match = _RANGE.fullmatch(given) if isinstance(given, str) else None
        if match is None:
            raise ValueError("that is neither a range nor a list")
        log, low, high = match[1] is not None, match[2], match[3]
        if name not in _FRACTIONS and _WHOLE.fullmatch(low) and _WHOLE.fullmatch(high):
            return IntDistribution(int(low), int(high), log=log)
        return FloatDistribution(float(low), float(high), log=log)
    except (TypeError, ValueError) as error:
        raise BadOption(f"space.{name} is {given!r}: {error}; {FORMS}") from error
