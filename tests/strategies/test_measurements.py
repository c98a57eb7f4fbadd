"""What is measured of a worker: its exchanges, and its updates by a clock that is set by hand."""

from __future__ import annotations

from tutti.records.trace import Trace
from tutti.strategies.measurements import Stopwatch, Traffic


def test_staleness_is_exact_below_64_and_counted_by_powers_of_two_from_there() -> None:
    traffic = Traffic()
    for updates in (0, 63, 63, 64, 127, 128, 255, 5000):
        traffic.add(staleness=updates)
    assert traffic.figures()["staleness"] == {0: 1, 63: 2, 64: 2, 128: 2, 4096: 1}


def test_ages_are_summed_up_by_mean_percentile_and_maximum() -> None:
    traffic = Traffic()
    for age in range(200):
        traffic.add(age_s=float(age))
    figures = traffic.figures()
    assert (figures["age_s_mean"], figures["age_s_p99"], figures["age_s_max"]) == (99.5, 198.0, 199.0)


def test_taking_resets_the_counts() -> None:
    traffic = Traffic()
    traffic.add(bytes_sent=8, wait_s=0.5, staleness=1)
    assert traffic.take().wait_s == 0.5
    assert traffic == Traffic()


def test_times_are_added_up_and_each_time_is_traced() -> None:
    now = iter([1.0, 3.0, 10.0, 14.5])
    watch = Stopwatch(lambda: next(now))
    watch.trace = Trace()
    for _ in range(2):
        with watch:
            pass
    assert watch.seconds == 6.5
    assert watch.trace.spans == [("update", 1.0, 3.0), ("update", 10.0, 14.5)]
