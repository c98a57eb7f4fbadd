"""Measurements of a worker: its exchanges with others, and the time of its updates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from tutti.records.trace import Trace

LATEST: Final = 10_000
"""The number of ages kept: enough for a 99th percentile, little memory in a long run."""

EXACT: Final = 64
"""From here on a record counts staleness by powers of two."""


@dataclass
class Traffic:
    """Counts of one worker since they were last taken."""

    exchanges: int = 0  # its exchanges with others
    bytes_sent: int = 0  # sent, or written for others to read
    wait_s: float = 0.0  # seconds in which it waited for others
    # {others' updates between computing a gradient and applying it: times}
    staleness: Counter[int] = field(default_factory=Counter)
    # the latest ages, in seconds, of the weights that a gradient was computed from
    ages_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    dropped: int = 0  # gradients that came too late and were not used
    skipped: int = 0  # exchanges that the strategy left out

    def add(
        self,
        bytes_sent: int = 0,
        wait_s: float = 0.0,
        staleness: int | None = None,
        age_s: float | None = None,
    ) -> None:
        """Count one exchange."""
        self.exchanges += 1
        self.bytes_sent += bytes_sent
        self.wait_s += wait_s
        if staleness is not None:
            self.staleness[staleness] += 1
        if age_s is not None:
            self.ages_s.append(age_s)

    def take(self) -> Traffic:
        """Return what was counted so far, and count from zero again."""
        taken, fresh = Traffic(**vars(self)), Traffic()
        vars(self).update(vars(fresh))
        return taken

    def figures(self) -> dict[str, Any]:
        """Return the counts for a record; ages as mean, 99th percentile and maximum."""
        stale: Counter[int] = Counter()
        for updates, count in self.staleness.items():
            stale[updates if updates < EXACT else 1 << (updates.bit_length() - 1)] += count
        return {
            "exchanges": self.exchanges,
            "bytes_sent": self.bytes_sent,
            "dropped": self.dropped,
            "skipped": self.skipped,
            "staleness": dict(sorted(stale.items())),
            **_spread("age_s", sorted(self.ages_s)),
        }


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_mean": None, f"{name}_p99": None, f"{name}_max": None}
    return {
        f"{name}_mean": sum(values) / len(values),
        f"{name}_p99": values[int(0.99 * len(values))],
        f"{name}_max": values[-1],
    }


class Stopwatch:
    """The sum of the seconds spent inside `with`; it cannot be nested."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock, self.seconds = clock, 0.0
        self.trace: Trace | None = None  # records each update

    def __enter__(self) -> None:
        self._began = self.clock()

    def __exit__(self, *_: object) -> None:
        ended = self.clock()
        self.seconds += ended - self._began
        if self.trace is not None:
            self.trace.add("update", self._began, ended)
