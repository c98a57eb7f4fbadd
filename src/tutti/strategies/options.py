"""Hyper-parameters of strategies: fields with a default, a help text, and the values that they may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: T, help: str, expected: str, allows: Callable[[Any], bool]) -> T:
    """Declare a field of a strategy; `help` is for `--help`, `expected` for the message of a refusal."""
    return field(default=default, metadata={"help": help, "expected": expected, "allows": allows})


def whole(default: int, help: str, least: int = 1) -> int:
    """Declare a whole number from `least`."""
    return option(
        default,
        f"{help}, from {least}",
        f"a whole number from {least}",
        lambda value: type(value) is int and value >= least,
    )


def number(
    default: T,
    help: str,
    *,
    least: float | None = None,
    above: float = -math.inf,
    most: float | None = None,
    below: float = math.inf,
) -> T:
    """Declare a number between bounds, inclusive (least, most) or exclusive (above, below).

    None is allowed as well if it is the default.
    """
    low = f"above {above:g}" if least is None else f"from {least:g}"
    high = f"to below {below:g}" if most is None else f"to {most:g}"
    words = " ".join(bound for bound in (low, high) if "inf" not in bound)

    def allows(value: Any) -> bool:
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            return value is None and default is None
        above_low = value > above if least is None else value >= least
        return above_low and (value < below if most is None else value <= most)

    return option(default, f"{help}, {words}", f"a number {words}", allows)


def text(help: str) -> str:
    """Declare a text, empty by default."""
    return option("", help, "a text", lambda value: isinstance(value, str))


def choice(default: T, help: str, values: Sequence[T]) -> T:
    """Declare one of some values."""
    known = ", ".join(map(str, values))
    return option(default, f"{help}: {known}", f"one of {known}", lambda value: value in values)
