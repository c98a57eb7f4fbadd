"""The space of a search: which options of a run are tried, and what each may be. No torch, no Optuna.

log:1e-4..1e-1        a number, each order of magnitude equally likely
0.1..0.9              a number
16..256               a whole number; log:16..256 too
64,128,256            one of these; in a file, or as JSON, a list of any values: [[64], [128, 64]]
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadOption, UnknownName
from tutti.models import MODELS
from tutti.records.json_lines import Json, to_json
from tutti.records.untrusted import read_file
from tutti.run.config import MOST_BYTES, TrainConfig, type_name
from tutti.studies.crossing import SHARED, with_options

FORMS: Final = "give log:1e-4..1e-1, 0.1..0.9, 16..256, or values with commas, such as 64,128,256"

_RANGE: Final = re.compile(r"\s*(log:)?\s*([^:]*?)\s*\.\.\s*([^:]*?)\s*")
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")

_FRACTIONS: Final = tuple(f.name for f in fields(TrainConfig) if type_name(f) == "float")
"""The options whose values are no whole numbers, even if the ends of a range are."""


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included.

    Attributes:
        low: the smallest.
        high: the largest.
        log: whether each order of magnitude is equally likely, instead of each number.
        whole: whether they are whole numbers.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def ends(self) -> tuple[float, float]:
        """Return two values that must be possible for all to be."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def as_json(self) -> str:
        """Return it as it is written."""
        low, high = self.ends()
        return f"{'log:' if self.log else ''}{low!r}..{high!r}"


@dataclass(frozen=True)
class Choice:
    """One of several values.

    Attributes:
        values: as JSON texts, so that lists can be told apart and kept.
    """

    values: tuple[str, ...]

    def ends(self) -> tuple[Any, ...]:
        """Return all values."""
        return tuple(json.loads(text) for text in self.values)

    def as_json(self) -> list[Any]:
        """Return it as it is written."""
        return list(self.ends())


Dimension = Range | Choice


@dataclass(frozen=True)
class Space:
    """The options that are searched, by name: "lr", or "model.hidden" for an option of a part."""

    dimensions: Mapping[str, Dimension]

    def as_json(self) -> Json:
        """Return it as JSON values, from which `space_of` makes it again."""
        return {name: one.as_json() for name, one in self.dimensions.items()}

    def check(self, base: TrainConfig) -> None:
        """Refuse a space of which some value cannot be used.

        Args:
            base: the options that all trials share.

        Raises:
            UserError: the message names the option.
        """
        for name, dimension in self.dimensions.items():
            _check_name(name, base, self.dimensions)
            for value in dimension.ends():
                with_options(base.as_json(), {name: value})


def space_of(given: Mapping[str, Any]) -> Space:
    """Return the space that is written in this way.

    Args:
        given: for each name a text such as "log:1e-4..1e-1", or a list of values.

    Raises:
        BadOption: one cannot be read, is empty, has a value twice, or the logarithm of what is not positive.
    """
    found: dict[str, Dimension] = {}
    for name, what in given.items():
        own = name.replace("-", "_")
        if own in found:
            raise BadOption(f"--space.{name} is given twice; give each option once")
        found[own] = _dimension(own, what)
    if not found:
        raise BadOption(
            "nothing is to be searched; give --space.lr log:1e-4..1e-1 or the like, or --space FILE"
        )
    return Space(found)


def read_space(path: str | Path) -> dict[str, Any]:
    """Read a space from a TOML file, as `space_of` takes it.

    lr = "log:1e-4..1e-1" is there, and an option of a part as model.hidden = [64, 128].

    Raises:
        BadOption: the file cannot be read.
    """
    try:
        values = tomllib.loads(read_file(Path(path), MOST_BYTES).decode())
    except OSError as error:
        raise BadOption(f"cannot read the space '{path}': {error.strerror}; name a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise BadOption(f"the space '{path}' is no TOML: {error}") from error
    return dict(_flat(values))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _flat(value))
        else:
            yield name, value


def _dimension(name: str, what: object) -> Dimension:
    if isinstance(what, list | tuple):
        return _choice(name, list(what))
    match = _RANGE.fullmatch(what) if isinstance(what, str) else None
    if match is None:
        raise BadOption(f"--space.{name} is {what!r}, and that is nothing to search; {FORMS}")
    low, high = _number(name, match[2]), _number(name, match[3])
    whole = name not in _FRACTIONS and all(_WHOLE.fullmatch(text) for text in (match[2], match[3]))
    if not low < high:
        why = "has a single value" if low == high else "is empty: it ends below its beginning"
        raise BadOption(f"--space.{name} {what} {why}; give the smaller number first, then a larger one")
    if match[1] and low <= 0:
        raise BadOption(
            f"--space.{name} is {what}, and {match[2]} has no logarithm; begin above 0, or leave log: out"
        )
    return Range(low, high, match[1] is not None, whole)


def _number(name: str, text: str) -> float:
    try:
        value = int(text) if _WHOLE.fullmatch(text) else float(text)
    except ValueError:
        raise BadOption(f"--space.{name}: '{text}' is not a number; {FORMS}") from None
    if not math.isfinite(value):
        raise BadOption(f"--space.{name}: {text} is not finite; {FORMS}")
    return value


def _choice(name: str, values: list[Any]) -> Choice:
    try:
        texts = [to_json(value) for value in values]
    except (TypeError, ValueError) as error:
        raise BadOption(f"--space.{name} has a value that is none of JSON: {error}; {FORMS}") from error
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise BadOption(f"--space.{name} has {twice} twice; give each value once")
    if len(texts) < 2:
        raise BadOption(f"--space.{name} leaves no choice: {', '.join(texts) or 'it is empty'}; {FORMS}")
    return Choice(tuple(texts))


def _check_name(name: str, base: TrainConfig, dimensions: Mapping[str, Dimension]) -> None:
    parts = {f.name.removesuffix("_options") for f in fields(base) if type_name(f) == "Options"}
    known = [f.name for f in fields(base) if type_name(f) != "Options" and f.name not in SHARED]
    own, dot, key = name.partition(".")
    field = f"{own}_options" if dot else own
    if field in SHARED:
        raise BadOption(f"--space.{name}: {SHARED[field]}")
    if (dot and own not in parts) or (not dot and own not in known):
        of_parts = [f"{part}.{key or 'KEY'}" for part in sorted(parts) if f"{part}_options" not in SHARED]
        raise UnknownName("option", f"--space.{name}", [f"--space.{one}" for one in [*known, *of_parts]])
    if dot and own == "model" and "model" not in dimensions and base.model in MODELS:
        options = MODELS.options(base.model)
        if key not in options:
            raise UnknownName("option", key, options, of=f"model '{base.model}'")
