"""How long a worker was busy with moving the weights, by a clock that is set by hand."""

from __future__ import annotations

from tutti.records.trace import Trace
from tutti.strategies.stopwatch import Stopwatch


def test_a_new_one_has_counted_nothing() -> None:
    watch = Stopwatch()
    assert (watch.seconds, watch.looks, watch.trace) == (0.0, 0, None)


def test_times_and_looks_are_added_up_and_each_time_is_traced() -> None:
    now = iter([1.0, 3.0, 10.0, 14.5])
    watch = Stopwatch(lambda: next(now))
    watch.trace = Trace()
    for _ in range(2):
        with watch:
            pass
    assert (watch.seconds, watch.looks) == (6.5, 4)
    assert watch.trace.spans == [("update", 1.0, 3.0), ("update", 10.0, 14.5)]
