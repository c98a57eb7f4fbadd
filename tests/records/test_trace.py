"""The picture of what ranks did: lanes, arrows and clocks, from traces that are made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tutti.records import run_folder
from tutti.records.run_folder import RunFolder
from tutti.records.trace import ClockReading, Lane, SpanLink, Trace, chrome_trace


def lane(number: int, trace: Trace, **more: Any) -> Lane:
    return Lane(f"rank {number}", more.pop("host", 0), "here", trace, **more)


def arrows(*traces: Trace) -> list[tuple[str, int, float, int, float]]:
    """Name, lane and microseconds of the begin, lane and microseconds of the end."""
    events = chrome_trace([lane(number, trace) for number, trace in enumerate(traces)])["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    return [
        (starts[at]["name"], starts[at]["tid"], starts[at]["ts"], ends[at]["tid"], ends[at]["ts"])
        for at in starts
    ]


def linked(*ends: tuple[float, float, SpanLink, object]) -> Trace:
    trace = Trace()
    for began, ended, kind, key in ends:
        trace.link("span", began, ended, kind, key)
    return trace


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


def test_a_message_goes_from_its_send_to_the_end_of_its_receipt() -> None:
    sender = linked((1.0, 1.25, SpanLink.SEND, "a"), (2.0, 2.25, SpanLink.SEND, "lost"))
    receiver = linked((0.0, 1.5, SpanLink.RECEIVE, "a"), (3.0, 3.5, SpanLink.RECEIVE, "of nobody"))
    assert arrows(sender, receiver) == [("message", 0, 1e6, 1, 1.5e6 - 1e-3)]


def test_the_last_rank_that_comes_to_a_barrier_releases_all_others() -> None:
    key = ("meeting", 1, 3)
    ranks = [linked((came, 5.0, SpanLink.MEET, key)) for came in (1.0, 4.0, 0.0)]
    assert arrows(*ranks) == [
        ("release", 1, 4e6, 0, 5e6 - 1e-3),
        ("release", 1, 4e6, 2, 5e6 - 1e-3),
    ]
    assert arrows(*ranks[:2]) == []  # one is missing, and it may be the last


def test_a_broadcast_goes_from_its_root_to_all_others() -> None:
    root = linked((1.0, 2.0, SpanLink.ROOT, "b"))
    leaves = [linked((0.0, 3.0, SpanLink.LEAF, "b")), linked((0.0, 4.0, SpanLink.LEAF, "b"))]
    found = [("broadcast", 1, 1e6, 0, 3e6 - 1e-3), ("broadcast", 1, 1e6, 2, 4e6 - 1e-3)]
    assert arrows(leaves[0], root, leaves[1]) == found


def test_a_lock_goes_from_each_holder_to_the_next_one_of_another_rank() -> None:
    first = linked((0.0, 1.0, SpanLink.HOLD, "l"), (1.0, 2.0, SpanLink.HOLD, "l"))
    second = linked((3.0, 4.0, SpanLink.HOLD, "l"), (5.0, 6.0, SpanLink.HOLD, "another"))
    assert arrows(first, second) == [("lock", 0, 2e6 - 1e-3, 1, 3e6)]


def test_no_arrow_goes_back_in_time_whatever_the_clocks_say() -> None:
    sender, receiver = linked((2.0, 2.1, SpanLink.SEND, "a")), linked((0.0, 1.0, SpanLink.RECEIVE, "a"))
    ((_, _, start, _, finish),) = arrows(sender, receiver)
    assert start == finish == 2e6


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


def test_a_large_picture_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = linked((1.0, 1.25, SpanLink.SEND, "a"))
    small = RunFolder(tmp_path).write_trace([lane(0, sent)])
    monkeypatch.setattr(run_folder, "LARGE", 2)
    large = RunFolder(tmp_path).write_trace([lane(0, sent)])
    assert (small.name, large.name) == ("trace.json", "trace-2.json.gz")
    assert json.loads(gzip.decompress(large.read_bytes())) == json.loads(small.read_text())
