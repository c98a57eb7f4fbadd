"""The verdict on a precision, from made-up losses."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tutti.studies.autotune.twins import LEAST_UPDATES, MOST_UPDATES, ORDERS, Twins, updates_within

FP32 = (0.58, 0.60, 0.62)
"""Their standard deviation is 0.02."""


def twins(*differences: float, before: float = 2.3) -> Twins:
    losses = tuple(loss + off for loss, off in zip(FP32, differences, strict=True))
    return Twins("bf16", 60, before, FP32, losses)


def test_losses_that_differ_no_more_than_orders_follow() -> None:
    found = twins(0.01, -0.01, 0.02)
    assert found.follows
    assert found.why() == (
        "after 60 updates its loss differs from fp32's by 2.36%, no more than the 3.33% of another order of "
        "the batches (3 orders)"
    )


@pytest.mark.parametrize("differences", [(0.03, 0.03, 0.03), (-0.03, -0.03, -0.03), (0.0, 0.0, 0.1)])
def test_losses_that_differ_more_than_orders_do_not_follow(differences: tuple[float, ...]) -> None:
    found = twins(*differences)
    assert not found.follows
    assert ", more than the 3.33% of another order" in found.why()


def test_a_training_that_learns_nothing_shows_nothing() -> None:
    found = twins(0.0, 0.0, 0.0, before=0.61)
    assert not found.follows
    assert "fell by less than the 3.33%" in found.why()


def test_a_problem_is_the_reason_and_has_no_figures() -> None:
    found = Twins("bf16", 60, problem="its loss is not finite in bf16")
    assert (found.follows, found.why()) == (False, "its loss is not finite in bf16")
    assert found.as_json()["why"] == found.why()
    assert "spread" not in found.as_json()
    assert replace(twins(0.0, 0.0, 0.0)).as_json()["follows"] is True


@pytest.mark.parametrize("worse", [0.1, 1.0, 2.0])
def test_the_probability_to_pass_is_that_of_the_formula(worse: float) -> None:
    drawn = random.Random(0)
    trials, passed = 4000, 0
    for _ in range(trials):
        losses = tuple(drawn.gauss(0.5, 0.01) for _ in range(ORDERS))
        passed += Twins("bf16", 60, 2.3, losses, tuple(loss + worse * 0.01 for loss in losses)).follows
    share = math.exp(-(worse**2))
    assert abs(passed / trials - share) < 4 * math.sqrt(share * (1 - share) / trials)


def test_the_length_of_trainings_depends_on_the_time_and_the_run() -> None:
    assert updates_within(9.0, 0.05, run=10_000) == 53
    assert updates_within(1e6, 0.05, run=10_000) == MOST_UPDATES
    assert updates_within(1e6, 0.05, run=30) == 30
    assert updates_within(0.1, 0.05, run=10_000) < LEAST_UPDATES
    assert updates_within(-1.0, 0.05, run=10_000) < LEAST_UPDATES
