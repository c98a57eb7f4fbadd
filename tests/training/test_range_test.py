"""The rate that is picked by the losses of a range test."""

from __future__ import annotations

import math
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from tutti.training.range_test import drawing, pick, rates_for

UPDATES = 1000
RATES = rates_for(UPDATES, 1e-5)


def valley(rate: float, fastest: float = 0.01, diverges: float = 0.3) -> float:
    """Return a loss that falls by half at one rate, and rises from another on."""
    fallen = 1 / (1 + (fastest / rate) ** 2)
    return 2.3 - 1.8 * fallen + (rate / diverges) ** 4


@pytest.mark.parametrize(("updates", "number"), [(399, 0), (400, 20), (1010, 50), (2000, 100), (10**6, 100)])
def test_a_test_takes_at_most_5_percent_of_the_updates(updates: int, number: int) -> None:
    rates = rates_for(updates, 1e-5)
    assert len(rates) == number <= updates / 20
    if rates:
        assert (rates[0], rates[-1]) == pytest.approx((1e-5, 1.0))


@pytest.mark.parametrize(
    ("loss", "adaptive", "gradient"),
    [
        (valley, 0.01, 0.007),
        (lambda rate: 100 * valley(rate), 0.01, 0.007),
        (lambda rate: valley(rate) - 5, 0.01, 0.007),
        (lambda rate: valley(rate, 0.001, 0.03), 0.001, 0.0007),
        (lambda rate: math.inf if rate > 0.3 else valley(rate, diverges=9), 0.01, 0.02),
        (lambda rate: valley(rate) + 0.05 * math.sin(1e6 * rate), 0.01, 0.007),  # noise of the batches
        (lambda rate: 2.3 + 0.01 * math.sin(1e6 * rate) + (rate / 0.1) ** 2, 0.02, 0.02),  # it never falls
    ],
)
def test_the_pick_follows_the_fall_of_the_loss(
    loss: Callable[[float], float], adaptive: float, gradient: float
) -> None:
    for follows, expected in ((True, adaptive), (False, gradient)):
        found = pick(RATES, [loss(rate) for rate in RATES], UPDATES, follows)
        assert found.rate is not None
        assert expected / 1.7 <= found.rate <= expected * 1.7
        assert found.why.startswith(f"learning rate {found.rate:g}: ")


def test_rounding_changes_no_pick() -> None:
    losses = [valley(rate) for rate in RATES]
    picks = {
        pick(RATES, [one * (1 + sign * 1e-6) for one in losses], UPDATES, True).rate for sign in (-1, 0, 1)
    }
    assert len(picks) == 1


@pytest.mark.parametrize("losses", [[2.0] * len(RATES), [math.inf]])
def test_a_loss_that_follows_no_rate_picks_none(losses: list[float]) -> None:
    assert pick(RATES, losses, UPDATES, True).rate is None


def test_the_drawing_has_each_loss_and_the_pick() -> None:
    losses = [valley(rate) for rate in RATES[:-1]] + [math.inf]
    found = pick(RATES, losses, UPDATES, True)
    drawn = ElementTree.fromstring(drawing(found))
    marks = [one.tag.rpartition("}")[2] for one in drawn.iter()]
    assert marks.count("circle") == len(losses)
    assert found.why in [one.text for one in drawn.iter()]
