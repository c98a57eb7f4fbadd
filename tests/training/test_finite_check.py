"""A running sum, seen some steps later."""

from __future__ import annotations

import torch

from tutti.training.finite_check import FiniteCheck, RunningSum


def found(seen: RunningSum) -> tuple[float, int, int]:
    return seen.total, seen.first, seen.last


def test_each_look_shows_what_the_sum_was_at_the_look_before() -> None:
    total, check = torch.zeros((), dtype=torch.float64), FiniteCheck(every=3)
    seen = []
    for step in range(1, 11):
        total.add_(1.0)
        seen.append(check.note(total, step))
    looks = {step: found(sight) for step, sight in enumerate(seen, start=1) if sight is not None}
    assert looks == {6: (3.0, 1, 3), 9: (6.0, 4, 6)}


def test_the_last_look_shows_the_sum_as_it_is_and_covers_what_was_not_looked_at() -> None:
    total, check = torch.zeros((), dtype=torch.float64), FiniteCheck(every=3)
    for step in range(1, 8):
        total.add_(1.0)
        check.note(total, step)
    assert found(check.last(total, 7)) == (7.0, 4, 7)
    total.zero_()
    for step in range(8, 10):
        total.add_(1.0)
        assert check.note(total, step) is None
    assert found(check.last(total, 9)) == (2.0, 8, 9)
