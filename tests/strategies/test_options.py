"""Values that hyper-parameters of strategies may not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any

import pytest

from tutti.errors import BadOption
from tutti.strategies import STRATEGIES, Solo
from tutti.strategies.options import choice, number, whole


def having(option: Any) -> type[Solo]:
    """A strategy with one hyper-parameter."""
    return make_dataclass("Having", [("size", Any, option)], bases=(Solo,), frozen=True)


@pytest.mark.parametrize(
    ("declare", "values", "words", "allowed", "refused"),
    [
        (whole, {}, "a whole number from 1", [1, 3], [0, -1, 2.0, "2", True]),
        (whole, {"least": 0}, "a whole number from 0", [0, 1], [-1]),
        (number, {"least": 0, "most": 1}, "a number from 0 to 1", [0, 0.5, 1], [-0.1, 1.1, None]),
        (number, {"above": 0, "below": 2}, "a number above 0 to below 2", [0.1, 1.9], [0, 2, -1, 3]),
        (number, {"above": 0}, "a number above 0", [0.1, 1e300], [0, -1, math.inf, math.nan]),
        (number, {"most": 2}, "a number to 2", [-1e300, 2], [2.1, math.inf, -math.inf, "1", True]),
        (choice, {"values": (1, 2)}, "one of 1, 2", [1, 2], [3, None]),
    ],
)
def test_a_strategy_of_ones_own_takes_the_values_that_it_declares_and_no_others(
    declare: Callable[..., Any],
    values: dict[str, Any],
    words: str,
    allowed: list[object],
    refused: list[object],
) -> None:
    strategy = having(declare(1, "size", **values))
    assert strategy().size == 1
    assert [strategy(size=value).size for value in allowed] == allowed
    for value in refused:
        with pytest.raises(BadOption, match=f"expected {words}$"):
            strategy(size=value)


def test_a_number_may_be_left_open_where_that_is_the_default() -> None:
    strategy = having(number(None, "size", least=1))
    assert strategy().size is None
    assert [strategy(size=value).size for value in (None, 1, 7.5)] == [None, 1, 7.5]
    for value in (0.9, "1", True):
        with pytest.raises(BadOption, match=r"expected a number from 1$"):
            strategy(size=value)


@pytest.mark.parametrize(
    ("declare", "values", "help"),
    [
        (whole, {}, "how many, from 1"),
        (number, {"least": 0, "below": 1}, "how many, from 0 to below 1"),
        (choice, {"values": (1, 2)}, "how many: 1, 2"),
    ],
)
def test_the_help_of_an_option_says_what_it_may_be(
    declare: Callable[..., Any], values: dict[str, Any], help: str
) -> None:
    assert declare(1, "how many", **values).metadata["help"] == help


BOUNDS = {
    "async_diloco": {"outer_lr": 0.0, "outer_momentum": 1.0, "delay": -1, "dynamic": "yes", "centre": 7},
    "diloco": {"mixing": 1.0, "compress": "int8"},
    "downpour": {"push_every": 0, "pull_every": 1.5, "staleness": "some", "side": "left", "decay": 1.0},
    "noloco": {"every": 0, "outer_lr": 0.0, "outer_momentum": 1.0, "pull": 1.5, "seed": -1},
    "sparseloco": {"keep": 0.0, "decay": 1.1, "quantize": "2"},
    "sync": {"collective": "rng", "reduce": "median", "compress": "zip", "keep": 1.5, "rank": 0, "every": 0},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_of_every_strategy_has_bounds(name: str) -> None:
    nothing = {field.name: [] for field in fields(STRATEGIES[name])}
    for option, value in [*nothing.items(), *BOUNDS.get(name, {}).items()]:
        with pytest.raises(BadOption, match=f"option '{option}' of strategy '{name}' is .*; expected "):
            STRATEGIES[name](**{option: value})
