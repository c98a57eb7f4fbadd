"""The picture of what ranks did: lanes and clocks, from traces that are made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.records.run_folder import RunFolder
from tutti.records.trace import ClockReading, Lane, Trace, chrome_trace


def lane(number: int, trace: Trace, **more: Any) -> Lane:
    return Lane(f"rank {number}", more.pop("host", 0), "here", trace, **more)


def test_spans_are_in_microseconds_from_the_first_of_all_ranks_and_the_outer_ones_come_first() -> None:
    first, second = Trace(), Trace()
    first.add("forward", 10.0, 10.25)
    first.add("epoch 1", 10.0, 12.0)
    second.add("forward", 9.5, 10.0)
    events = chrome_trace([lane(0, first), lane(1, second, host=1)])["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(one["name"], one["ts"], one["dur"], one["pid"], one["tid"]) for one in spans] == [
        ("epoch 1", 500_000.0, 2_000_000.0, 0, 0),
        ("forward", 500_000.0, 250_000.0, 0, 0),
        ("forward", 0.0, 500_000.0, 1, 1),
    ]
    names = [event["args"].get("name") for event in events if event["ph"] == "M"]
    assert names == ["here", "rank 0", None, "here", "rank 1", None]


@pytest.mark.parametrize(
    ("readings", "at", "expected"),
    [
        ((), 7.0, 7.0),
        ((ClockReading(10.0, 2.0, 1e-6),), 12.0, 10.0),
        ((ClockReading(10.0, 2.0, 1e-6), ClockReading(20.0, 4.0, 2e-6)), 15.0, 12.0),
        ((ClockReading(10.0, 2.0, 1e-6), ClockReading(20.0, 4.0, 2e-6)), 30.0, 24.0),
    ],
)
def test_times_are_those_of_rank_0_on_the_line_between_two_readings(
    readings: tuple[ClockReading, ...], at: float, expected: float
) -> None:
    assert lane(1, Trace(), readings=readings).nanoseconds(at) == expected * 1e9


def test_a_trace_is_written_beside_that_of_an_earlier_start(tmp_path: Path) -> None:
    sent = Trace(spans=[("send", 1.0, 1.25)])
    first = RunFolder(tmp_path).write_trace([lane(0, sent)])
    second = RunFolder(tmp_path).write_trace([lane(0, sent)])
    assert (first.name, second.name) == ("trace.json", "trace-2.json")
    assert [event["name"] for event in json.loads(first.read_text())["traceEvents"]][-1] == "send"
