"""The rank that all others wait for, from records with known times."""

from __future__ import annotations

import pytest

from tutti.records.run import RankRecord
from tutti.records.stragglers import Straggler, straggler


def records(*ranks: tuple[int, float], compared: int = 100) -> list[list[RankRecord]]:
    """An epoch of ranks that came last so often, and took so long."""
    return [[RankRecord(compared=compared, last=last, own_s=own_s)] for last, own_s in ranks]


def test_the_rank_that_is_last_and_slow_is_named() -> None:
    found = straggler(records((4, 0.010), (93, 0.018), (3, 0.010)))
    assert found == Straggler(1, 0.93, pytest.approx(1.8))
    assert str(found) == "rank 1 arrives last in 93% of the steps, and takes 1.8 times as long as the others"


def test_epochs_are_taken_together_by_their_steps() -> None:
    short, long = records((10, 1.0), (0, 1.0), compared=10), records((0, 1.0), (90, 2.0), compared=90)
    both = [[*one, *other] for one, other in zip(short, long, strict=True)]
    assert straggler(both) == Straggler(1, 0.9, pytest.approx(1.9))


@pytest.mark.parametrize(
    "ranks",
    [
        records((50, 0.010), (50, 0.020)),
        records((95, 0.0101), (5, 0.0100)),
        records((100, 0.010)),
        records((0, 0.0), (0, 0.0), compared=0),
        [],
    ],
    ids=["in turn", "by a hair", "alone", "not compared", "nothing"],
)
def test_nobody_is_named_who_is_not_always_late(ranks: list[list[RankRecord]]) -> None:
    assert straggler(ranks) is None
