"""A rank's time by stage: all of it, from one look at the clock to the next, belongs to one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from time import perf_counter
from types import MappingProxyType
from typing import Final

from tutti.records.run import STAGES
from tutti.records.trace import Trace
from tutti.strategies.measurements import Stopwatch, Traffic

EXCHANGE: Final = "exchange"
"""A lap to be divided into wait, reduce and update."""

_TRIALS: Final = 5
_LAPS: Final = 100


class StageTimer:
    """Seconds by stage since they were last taken.

    Attributes:
        last: the time of the last lap.
        trace: where each lap is noted; None: nowhere.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.trace: Trace | None = None
        self._seconds = dict.fromkeys((*STAGES, EXCHANGE), 0.0)
        self._looks, self.last = 0, clock()

    def start(self) -> float:
        """Count the time since the last lap for no stage; returns the time."""
        self.last = self._clock()
        return self.last

    def lap(self, stage: str, others: Mapping[str, float] = MappingProxyType({})) -> float:
        """Count the time since the last lap for `stage`, or for an exchange; returns the time.

        Args:
            stage: what all of it belongs to, but for
            others: seconds of it by stage. What is beyond the lap was no part of it, and counts for none.
        """
        now = self._clock()
        left = now - self.last
        for other, seconds in others.items():
            seconds = min(seconds, left)
            self._seconds[other] += seconds
            left -= seconds
        self._seconds[stage] += left
        if self.trace is not None:
            self.trace.add(stage, self.last, now)
        self.last = now
        self._looks += 1
        return now

    def divide(self, traffic: Traffic, updating: Stopwatch) -> None:
        """Divide the exchanges; `traffic` and `updating` say what of them was waiting, and what updates."""
        seconds = self._seconds
        rest = seconds[EXCHANGE] - traffic.wait_s - updating.seconds
        seconds["wait"] += traffic.wait_s
        seconds["update"] += updating.seconds
        # Waiting is measured by the communicator's clock, which may be another than this.
        seconds["reduce"] += max(0.0, rest)
        seconds[EXCHANGE] = 0.0
        self._looks += updating.looks
        updating.seconds, updating.looks = 0.0, 0

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far by stage, exchanges among them."""
        return dict(self._seconds)

    def load(self, seconds: Mapping[str, float]) -> None:
        """Count on from these seconds."""
        self._seconds.update(seconds)

    def take(self, look_s: float) -> tuple[dict[str, float], float]:
        """The seconds by stage, and how many of them the looks at the clock took, at `look_s` each."""
        taken = {stage: self._seconds[stage] for stage in STAGES}
        measuring_s = self._looks * look_s
        self._seconds, self._looks = dict.fromkeys(self._seconds, 0.0), 0
        return taken, measuring_s


def look_s(clock: Callable[[], float]) -> float:
    """The cost of a lap in seconds: the best of some trials. Of the real clock they are made once."""
    return _look_at_real_clock_s() if clock is perf_counter else _measure_look_s(clock)


@cache
def _look_at_real_clock_s() -> float:
    return _measure_look_s(perf_counter)


def _measure_look_s(clock: Callable[[], float]) -> float:
    trial = StageTimer(clock)

    def laps() -> float:
        began = clock()
        for _ in range(_LAPS):
            trial.lap(EXCHANGE)
        return (clock() - began) / _LAPS

    return min(laps() for _ in range(_TRIALS))
