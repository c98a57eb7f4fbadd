"""A time-line of all ranks: spans of time in a lane for each rank, and arrows between them.

The file is in Chrome's trace event format (Google, "Trace Event Format", 2016), which ui.perfetto.dev and
chrome://tracing open. Needs neither torch nor MPI.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Final

LIMIT: Final = 200_000
"""The most spans of a rank that are kept, and the most ends of arrows."""

SHORTEST_S: Final = 1e-6
"""Shorter spans without an arrow are not kept."""


class SpanLink(Enum):
    """The kinds of arrows' ends. Ends with the same key belong together."""

    SEND = "a message leaves"
    RECEIVE = "a message has come"
    MEET = "all ranks arrive; the last one releases the others"
    ROOT = "gives to all who are `LEAF`"
    LEAF = "takes from `ROOT`"
    HOLD = "has a lock, which its next holder may have waited for"


@dataclass
class Trace:
    """The spans of one rank. Times are in seconds of its own clock.

    Attributes:
        limit: the most spans that are kept, and the most links.
        spans: name, begin and end.
        links: the kind, a key, begin and end of a span that is one end of an arrow.
        left_out: spans that came after the limit.
    """

    limit: int = LIMIT
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    links: list[tuple[SpanLink, Hashable, float, float]] = field(default_factory=list)
    left_out: int = 0

    def add(self, name: str, began: float, ended: float) -> None:
        """Record a span, unless it is too short to be seen."""
        if ended - began >= SHORTEST_S:
            self._keep(name, began, ended)

    def link(self, name: str, began: float, ended: float, kind: SpanLink, key: Hashable) -> None:
        """Record a span that is one end of an arrow; without a name, the span itself is recorded already."""
        if name:
            self._keep(name, began, ended)
        if len(self.links) < self.limit:
            self.links.append((kind, key, began, ended))

    def _keep(self, name: str, began: float, ended: float) -> None:
        if len(self.spans) < self.limit:
            self.spans.append((name, began, ended))
        else:
            self.left_out += 1


@dataclass(frozen=True)
class ClockReading:
    """A measured offset of a rank's clock from that of rank 0.

    Attributes:
        at: the time of the measurement, by the rank's own clock.
        ahead_s: the seconds that its clock was ahead.
        residual_s: the largest error of `ahead_s`, in seconds.
    """

    at: float
    ahead_s: float
    residual_s: float


@dataclass(frozen=True)
class Lane:
    """A rank's part of the time-line.

    Attributes:
        name: of the lane.
        host: the number of its host.
        host_name: the name of its host.
        trace: its spans.
        readings: of its clock, at the begin and at the end; none where the host has rank 0's clock.
    """

    name: str
    host: int
    host_name: str
    trace: Trace
    readings: tuple[ClockReading, ...] = ()

    def nanoseconds(self, at: float) -> int:
        """Convert a time of this rank's clock to that of rank 0."""
        if not self.readings:
            return round(1e9 * at)
        first, last = self.readings[0], self.readings[-1]
        # Clocks drift evenly.
        part = (at - first.at) / (last.at - first.at) if last.at > first.at else 0.0
        return round(1e9 * (at - first.ahead_s - part * (last.ahead_s - first.ahead_s)))


@dataclass(frozen=True)
class FlowArrow:
    """An arrow from one lane to another; times in nanoseconds by the clock of rank 0."""

    name: str
    source: int
    start: int
    to: int
    finish: int


def chrome_trace(lanes: Sequence[Lane], whole: bool = True) -> dict[str, Any]:
    """Return the lanes as a JSON object in Chrome's format; times begin at 0 and are in microseconds."""
    starts = [lane.nanoseconds(began) for lane in lanes for _, began, _ in lane.trace.spans]
    zero = min(starts, default=0)
    events = [event for number, lane in enumerate(lanes) for event in _lane(number, lane, zero)]
    for number, arrow in enumerate(_arrows(lanes)):
        # None goes back in time, whatever error the clocks have left.
        common = {"name": arrow.name, "cat": "arrow", "id": number}
        for phase, rank, at in (
            ("s", arrow.source, arrow.start),
            ("f", arrow.to, max(arrow.start, arrow.finish)),
        ):
            place = {"ts": (at - zero) / 1e3, "pid": lanes[rank].host, "tid": rank}
            events.append({**common, "ph": phase, "bp": "e", **place})
    residuals = [reading.residual_s for lane in lanes for reading in lane.readings]
    about = {
        "complete": whole,
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


End = tuple[SpanLink, int, int, int]
"""The kind, the lane, and the span in nanoseconds of one end."""


def _arrows(lanes: Sequence[Lane]) -> Iterator[FlowArrow]:
    ends: dict[Hashable, list[End]] = defaultdict(list)
    for number, lane in enumerate(lanes):
        for kind, key, began, ended in lane.trace.links:
            ends[key].append((kind, number, lane.nanoseconds(began), lane.nanoseconds(ended)))
    for key, found in ends.items():
        kinds = {kind for kind, *_ in found}
        if kinds == {SpanLink.MEET}:
            yield from _releases(key, found)
        elif kinds == {SpanLink.HOLD}:
            yield from _hand_overs(found)
        else:
            yield from _messages(found)


def _messages(found: list[End]) -> Iterator[FlowArrow]:
    """Yield the arrows from sender to receivers; none if an end was not recorded."""
    for kind, source, start, _ in found:
        if kind in (SpanLink.SEND, SpanLink.ROOT):
            name = "message" if kind is SpanLink.SEND else "broadcast"
            for other, to, began, ended in found:
                if other in (SpanLink.RECEIVE, SpanLink.LEAF):
                    yield FlowArrow(name, source, start, to, max(began, ended - 1))
            return


def _releases(key: Hashable, found: list[End]) -> Iterator[FlowArrow]:
    """Yield arrows from the last rank to arrive to the others; `key` ends with the number of ranks."""
    if not isinstance(key, tuple) or len(found) != key[-1]:
        return
    _, last, start, _ = max(found, key=lambda end: end[2])
    for _, to, began, ended in found:
        if to != last:
            yield FlowArrow("release", last, start, to, max(began, ended - 1))


def _hand_overs(found: list[End]) -> Iterator[FlowArrow]:
    """Yield an arrow from each holder of a lock to the next one, if that is another rank."""
    ordered = sorted(found, key=lambda end: end[2])
    for (_, source, began, ended), (_, to, start, _) in pairwise(ordered):
        if to != source:
            yield FlowArrow("lock", source, max(began, ended - 1), to, start)
