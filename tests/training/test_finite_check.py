"""A running sum, seen some steps later."""

from __future__ import annotations

import torch

from tutti.training.finite_check import Lookout, Sight


def test_each_look_shows_what_the_sum_was_at_the_look_before() -> None:
    total, lookout = torch.zeros((), dtype=torch.float64), Lookout(every=3)
    seen = []
    for step in range(1, 11):
        total.add_(1.0)
        seen.append(lookout.note(total, step))
    assert [(step, sight) for step, sight in enumerate(seen, start=1) if sight is not None] == [
        (6, Sight(3.0, 1, 3)),
        (9, Sight(6.0, 4, 6)),
    ]


def test_the_last_look_shows_the_sum_as_it_is_and_covers_what_was_not_looked_at() -> None:
    total, lookout = torch.zeros((), dtype=torch.float64), Lookout(every=3)
    for step in range(1, 8):
        total.add_(1.0)
        lookout.note(total, step)
    assert lookout.last(total, 7) == Sight(7.0, 4, 7)
    total.zero_()
    for step in range(8, 10):
        total.add_(1.0)
        assert lookout.note(total, step) is None
    assert lookout.last(total, 9) == Sight(2.0, 8, 9)
