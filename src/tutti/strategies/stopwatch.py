"""A clock for the parts of a step."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from tutti.records.trace import Trace


class Stopwatch:
    """The sum of the seconds spent inside `with`; it cannot be nested.

    Attributes:
        clock: what it looks at, in seconds.
        seconds: since they were last taken.
        looks: how often it has looked at the clock.
        trace: where each time is noted as an update; None: nowhere.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock, self.seconds, self.looks = clock, 0.0, 0
        self.trace: Trace | None = None

    def __enter__(self) -> None:
        self._began = self.clock()

    def __exit__(self, *_: object) -> None:
        ended = self.clock()
        self.seconds += ended - self._began
        self.looks += 2
        if self.trace is not None:
            self.trace.add("update", self._began, ended)
