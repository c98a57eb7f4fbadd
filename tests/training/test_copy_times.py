"""The times at which the state is copied in memory."""

from __future__ import annotations

import math

import pytest

from tutti.training.copy_times import MAPPED_S, SHARE, CopyTimes


def test_copies_take_a_share_of_the_time_but_the_first_ones_come_soon() -> None:
    times = CopyTimes(None)
    pauses = [times.pause_s]
    for seconds in (0.9, 0.8, 0.2, 0.2):  # The first two map the memory.
        times.note(seconds)
        pauses.append(times.pause_s)
    assert pauses == [0.0, MAPPED_S, MAPPED_S, 0.2 / SHARE, 0.2 / SHARE]


def test_a_copy_that_was_held_up_does_not_put_off_the_next_one() -> None:
    times = CopyTimes(None)
    for seconds in (0.01, 0.01, 0.01, 0.5):
        times.note(seconds)
    assert times.pause_s == 0.01 / SHARE


def test_copies_that_have_become_slower_come_less_often_in_the_end() -> None:
    times = CopyTimes(None)
    for seconds in [0.01] * 3 + [0.04] * 5:
        times.note(seconds)
    assert times.pause_s == 0.04 / SHARE


@pytest.mark.parametrize("every_s", [1.0, 5.0, 60.0])
def test_where_ranks_are_lost_copies_and_steps_made_again_cost_as_little_as_they_can(every_s: float) -> None:
    times, cost_s = CopyTimes(every_s), 0.004
    for _ in range(3):
        times.note(cost_s)

    def lost(pause_s: float) -> float:
        return cost_s / pause_s + pause_s / 2 / every_s

    pause_s = times.pause_s
    assert pause_s == pytest.approx(min(math.sqrt(2 * cost_s * every_s), cost_s / SHARE))
    others = [pause_s * factor for factor in (0.5, 0.9) + (1.1, 2.0) * (pause_s < cost_s / SHARE)]
    assert all(lost(pause_s) < lost(other) for other in others)
