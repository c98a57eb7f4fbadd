"""A rank's work and its time by stage: the time between two readings of the clock belongs to one stage."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, cast

import numpy as np

from tutti.comm.base import Communicator
from tutti.records.run import STAGES, RankRecord
from tutti.records.trace import Trace
from tutti.strategies.measurements import Stopwatch, Traffic

EXCHANGE: Final = "exchange"
"""A lap that is divided into wait, reduce and update."""

MOST: Final = 4096
"""The first steps of an epoch, whose arrivals are compared."""


class StageTimer:
    """Seconds by stage; `last` is the time of the last lap, and `trace` gets each lap."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.trace: Trace | None = None
        self._seconds = dict.fromkeys((*STAGES, EXCHANGE), 0.0)
        self.last = clock()

    def start(self) -> float:
        """Begin a lap without counting the time since the last one; return the time."""
        self.last = self._clock()
        return self.last

    def lap(self, stage: str, others: Mapping[str, float] = MappingProxyType({})) -> float:
        """Count the time since the last lap for `stage`, but `others` for other stages; return the time."""
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
        return now

    def divide(self, traffic: Traffic, updating: Stopwatch) -> None:
        """Divide the exchanges into waiting (by `traffic`), updates (by `updating`) and the rest."""
        seconds = self._seconds
        rest = seconds[EXCHANGE] - traffic.wait_s - updating.seconds
        seconds["wait"] += traffic.wait_s
        seconds["update"] += updating.seconds
        # The communicator measures waiting by its own clock.
        seconds["reduce"] += max(0.0, rest)
        seconds[EXCHANGE] = 0.0
        updating.seconds = 0.0

    def take(self) -> dict[str, float]:
        """Return the seconds by stage, and count from zero again."""
        taken = {stage: self._seconds[stage] for stage in STAGES}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken


class RankWork:
    """The work of this rank since its last record.

    A delay of one worker hides in the exchange, where the others wait for it. So each notes the time from the
    end of one exchange to the beginning of the next one, and at the end of an epoch they compare:

        rank 0   own 1 │ exchange ....... │ own 2 │ exchange ....... │      last in  0 of 2 steps
        rank 1   own 1          │ exchange│ own 2          │ exchange│      last in  2 of 2
    """

    def __init__(self, clock: Callable[[], float], traffic: Traffic) -> None:
        self.stages, self.steps = StageTimer(clock), 0
        self._traffic, self._own_s = traffic, array("f")

    def note_arrival(self, own_s: float) -> None:
        """Note the seconds from the end of an exchange to the beginning of the next one."""
        if len(self._own_s) < MOST:
            self._own_s.append(own_s)

    def records(self, samples: int, left_out: int, comm: Communicator) -> list[RankRecord]:
        """Return the records of all ranks, and count from zero again (collective)."""
        figures = self._traffic.take().figures()
        mine = RankRecord(self.steps, samples, self.stages.take(), **figures, left_out=left_out)
        gathered = comm.all_gather_objects((mine, self._own_s.tobytes()))
        self.steps, self._own_s = 0, array("f")
        return compared(cast("list[tuple[RankRecord, bytes]]", gathered))


def compared(ranks: Sequence[tuple[RankRecord, bytes]]) -> list[RankRecord]:
    """Add to the records of an epoch each rank's own time, and how often it came last."""
    steps = min(len(taken) for _, taken in ranks) // array("f").itemsize
    if len(ranks) < 2 or not steps:
        return [record for record, _ in ranks]
    seconds = np.stack([np.frombuffer(taken, np.float32, steps) for _, taken in ranks])
    last = np.bincount(seconds.argmax(0), minlength=len(ranks)).tolist()
    usual = np.median(seconds, axis=1).tolist()
    return [
        replace(record, compared=steps, last=count, own_s=own)
        for (record, _), count, own in zip(ranks, last, usual, strict=True)
    ]
