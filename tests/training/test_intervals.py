"""Lengths of time and intervals, as users write them."""

from __future__ import annotations

import pytest

from tutti.errors import BadOption
from tutti.training.intervals import Every, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("3h50m", 13800), ("2d", 172800), ("1.5h", 5400), (" 1d 2h 3m 4s ", 93784), ("0h5m", 300)],
)
def test_a_length_of_time_is_the_sum_of_its_numbers(text: str, seconds: float) -> None:
    assert seconds_of(text, "--time-limit") == seconds


@pytest.mark.parametrize("text", ["", "90", "0s", "-5m", "1e3s", "5 parsecs", "٣h", "9" * 400 + "s"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match=r"--time-limit is .* such as 3h50m, 90s or 2d"):
        seconds_of(text, "--time-limit")


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("10m", Every(seconds=600)),
        ("every 1h30m", Every(seconds=5400)),
        ("500 steps", Every(steps=500)),
        ("every 500 steps", Every(steps=500)),
        ("1 epoch", Every(epochs=1)),
        ("every epoch", Every(epochs=1)),
        ("2epochs", Every(epochs=2)),
        ("off", None),
    ],
)
def test_intervals(text: str, every: Every | None) -> None:
    assert Every.parse(text, "--checkpoint") == every


@pytest.mark.parametrize(
    "text", ["", "every", "every off", "0 steps", "0m", "-1 epochs", "500", "1.5 epochs", "10 moons"]
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match=r"--checkpoint is .*; give "):
        Every.parse(text, "--checkpoint")


def test_an_interval_is_over_by_what_it_counts() -> None:
    assert Every(seconds=600).is_over(600.0, 0, 0)
    assert not Every(seconds=600).is_over(599.9, 10**9, 10**9)
    assert Every(steps=5).is_over(0.0, 5, 0)
    assert not Every(steps=5).is_over(1e9, 4, 10**9)
    assert Every(epochs=2).is_over(0.0, 0, 2)
    assert not Every(epochs=2).is_over(1e9, 10**9, 1)
