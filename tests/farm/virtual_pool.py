"""Blocks simulated under a virtual clock: for tests of the coordinator, and for figures of many blocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from tutti.farm.coordinator import BlockFailed, JobOver, PoolEvent, StopAsked
from tutti.farm.jobs import FarmJob
from tutti.records.run import Summary, World

NEVER: Final = float("inf")


@dataclass(frozen=True)
class Course:
    """The course of a simulated job."""

    seconds: float
    fails: str = ""  # why; empty: it finishes
    stops_s: float = 0.0  # the time to stop on request; `NEVER`: it cannot be stopped


@dataclass
class VirtualPool:
    """Blocks that only pass time."""

    blocks: int
    course: Callable[[FarmJob], Course]
    overhead_s: float = 0.0  # of each job
    stops_at: float = NEVER  # the time of a request to stop the farm
    began: list[tuple[float, int, str]] = field(default_factory=list)  # time, block and name of each job
    _now: float = 0.0
    _order: count[int] = field(default_factory=count)
    _events: list[tuple[float, int, int, PoolEvent]] = field(default_factory=list)
    _work: dict[int, tuple[int, Course]] = field(default_factory=dict)
    """The number and the course of each block's job: events of earlier jobs do not count."""

    def __post_init__(self) -> None:
        if self.stops_at != NEVER:
            heapq.heappush(self._events, (self.stops_at, next(self._order), -1, StopAsked("it was asked to")))

    def now(self) -> float:
        """Return the virtual time."""
        return self._now

    def begin(self, block: int, job: FarmJob) -> None:
        """Have a block pass the time of a job."""
        assert block not in self._work, "a block works on one job at a time"
        self.began.append((self._now, block, job.name))
        course, number = self.course(job), next(self._order)
        self._work[block] = number, course
        end = (
            BlockFailed(block, course.fails, died=True)
            if course.fails
            else JobOver(block, _summary(course.seconds))
        )
        self._add(course.seconds + self.overhead_s, block, end)

    def wait(self, until: float) -> Sequence[PoolEvent]:
        """Go on to the next event, or to `until`."""
        while self._events and self._events[0][0] <= until:
            self._now, _, number, event = heapq.heappop(self._events)
            if isinstance(event, StopAsked):
                return [event]
            work = self._work.get(event.block)
            if work is not None and work[0] == number:
                del self._work[event.block]
                return [event]
        assert until != NEVER, "jobs that hang are waited for without a limit"
        self._now = max(self._now, until)
        return []

    def answer(self, block: int, ends: bool) -> None:
        """Simulated jobs have no epochs."""

    def ask_to_stop(self) -> None:
        """Have the jobs stop that can."""
        for block, (_, course) in self._work.items():
            if course.stops_s != NEVER:
                self._add(course.stops_s, block, JobOver(block, None, "it was asked to"))

    def restart(self, block: int) -> JobOver | None:
        """Forget the job of a block, which has not ended."""
        self._work.pop(block, None)
        return None

    def _add(self, seconds: float, block: int, event: PoolEvent) -> None:
        if seconds != NEVER:
            number = self._work[block][0]
            heapq.heappush(self._events, (self._now + seconds, next(self._order), number, event))


def _summary(seconds: float) -> Summary:
    return Summary(None, None, 0, 1, 1, 1, seconds, 0.0, World(), {}, "")
