"""A time-line of all ranks: spans of time in a lane for each rank.

The file is in Chrome's trace event format (Google, "Trace Event Format", 2016), which ui.perfetto.dev and
chrome://tracing open. Needs neither torch nor MPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

LIMIT: Final = 200_000
"""The most spans of a rank that are kept."""

SHORTEST_S: Final = 1e-6
"""Shorter spans are not kept."""


@dataclass
class Trace:
    """The spans of one rank. Times are in seconds by its clock."""

    limit: int = LIMIT
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin and end
    left_out: int = 0  # spans that came after the limit

    def add(self, name: str, began: float, ended: float) -> None:
        """Record a span, unless it is too short to be seen."""
        if ended - began < SHORTEST_S:
            return
        if len(self.spans) < self.limit:
            self.spans.append((name, began, ended))
        else:
            self.left_out += 1


@dataclass(frozen=True)
class ClockReading:
    """A measured offset of a rank's clock from rank 0's."""

    at: float  # by the rank's own clock
    ahead_s: float
    residual_s: float  # the largest error of `ahead_s`


@dataclass(frozen=True)
class Lane:
    """A rank's part of the time-line."""

    name: str
    host: int  # its number
    host_name: str
    trace: Trace
    readings: tuple[ClockReading, ...] = ()  # at the begin and the end; none where rank 0's clock is used

    def nanoseconds(self, at: float) -> int:
        """Convert a time of this rank's clock to rank 0's."""
        if not self.readings:
            return round(1e9 * at)
        first, last = self.readings[0], self.readings[-1]
        # Clocks drift evenly.
        part = (at - first.at) / (last.at - first.at) if last.at > first.at else 0.0
        return round(1e9 * (at - first.ahead_s - part * (last.ahead_s - first.ahead_s)))


def chrome_trace(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return the lanes as a JSON object in Chrome's format; times begin at 0 and are in microseconds."""
    starts = [lane.nanoseconds(began) for lane in lanes for _, began, _ in lane.trace.spans]
    zero = min(starts, default=0)
    events = [event for number, lane in enumerate(lanes) for event in _lane(number, lane, zero)]
    residuals = [reading.residual_s for lane in lanes for reading in lane.readings]
    about = {
        "spans left out": {lane.name: lane.trace.left_out for lane in lanes if lane.trace.left_out},
        "clocks are aligned to, in microseconds": 1e6 * max(residuals, default=0.0),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _lane(number: int, lane: Lane, zero: int) -> Iterator[dict[str, Any]]:
    place = {"pid": lane.host, "tid": number}
    yield {"ph": "M", "name": "process_name", **place, "args": {"name": lane.host_name}}
    yield {"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}}
    yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
    times = [(lane.nanoseconds(b), lane.nanoseconds(e), name) for name, b, e in lane.trace.spans]
    # Spans that contain others come before them.
    for began, ended, name in sorted(times, key=lambda one: (one[0], -one[1])):
        span = {"ts": (began - zero) / 1e3, "dur": (ended - began) / 1e3}
        yield {"ph": "X", "name": name, "cat": "tutti", **span, **place}
