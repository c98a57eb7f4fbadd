"""Checks of the values of a strategy's hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Collection

from tutti.errors import BadOption
from tutti.strategies.base import Strategy


def at_least(strategy: Strategy, field: str, least: int) -> None:
    """Refuse a number below `least`, or one that is not whole.

    Raises:
        BadOption: it is.
    """
    value = getattr(strategy, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refusal(strategy, field, f"a whole number from {least}")


def within(
    strategy: Strategy, field: str, least: float, most: float, *, above: bool = False, below: bool = False
) -> None:
    """Refuse a number outside least .. most.

    Args:
        strategy: whose field it is.
        field: its name.
        least: the smallest value.
        most: the largest value.
        above: whether `least` itself is refused.
        below: whether `most` itself is refused.

    Raises:
        BadOption: it is outside, or no number.
    """
    value = getattr(strategy, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _refusal(strategy, field, "a number")
    too_small = value <= least if above else value < least
    too_large = value >= most if below else value > most
    if too_small or too_large:
        low = f"{'above' if above else 'from'} {least:g}"
        high = "" if most == math.inf else f" {'to below' if below else 'to'} {most:g}"
        raise _refusal(strategy, field, f"a number {low}{high}")


def one_of(strategy: Strategy, field: str, values: Collection[object]) -> None:
    """Refuse a value that is not among `values`.

    Raises:
        BadOption: it is not.
    """
    if getattr(strategy, field) not in values:
        raise _refusal(strategy, field, f"one of {', '.join(map(str, values))}")


def as_given(strategy: Strategy, field: str) -> str:
    """Return the words with which an error message names a hyper-parameter and its value."""
    return f"option '{field}' of strategy '{strategy.name}' is {getattr(strategy, field)!r}"


def _refusal(strategy: Strategy, field: str, expected: str) -> BadOption:
    return BadOption(f"{as_given(strategy, field)}; expected {expected}")
