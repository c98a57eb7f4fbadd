"""The samples of each update, split over the ranks by their speeds."""

from __future__ import annotations

from typing import Final

import torch

from tutti.comm.base import Communicator, cut
from tutti.data.batches import LEAST, Batches, by_speed

FIRST: Final = 8
"""Updates before the ranks compare their speeds for the first time."""

EVERY: Final = 32
"""Updates between two comparisons after that."""

WORTHWHILE: Final = 0.95
"""A new split is taken when it shortens the slowest rank's time to this part of it."""


class SpeedBalance:
    """The split of an update with which all ranks compute for the same time.

    Every few dozen updates the ranks exchange their samples per second, and all cut the batches in the same
    new way. Gradients stay weighted by their samples, so the update's gradient is still the mean. A resumed
    run measures again.

        rank 0        ■■■■■■■■■■■■■│■■■■■■■■■■■■■│  speeds 3 : 1  │■■■■■■■■■■■■■■■■■■■■■│
        rank 1 slow   ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■│■■■■■■■■■■■■■■■■■■■■■│
    """

    def __init__(self, batches: Batches, comm: Communicator) -> None:
        self._batches, self._comm = batches, comm
        self._parts = [part.stop - part.start for part in cut(batches.batch_size, comm.size)]
        self._samples, self._seconds, self._left = 0, 0.0, FIRST

    def note(self, samples: int, seconds: float) -> None:
        """Count this rank's samples of an update, and the seconds they took (collective)."""
        self._samples += samples
        self._seconds += seconds
        self._left -= 1
        if self._left == 0:
            self._compare()
            self._samples, self._seconds, self._left = 0, 0.0, EVERY

    def _compare(self) -> None:
        speeds = torch.zeros(self._comm.size, dtype=torch.float64)
        if self._seconds > 0:
            speeds[self._comm.rank] = self._samples / self._seconds
        self._comm.all_gather(speeds)
        all_speeds: list[float] = speeds.tolist()
        if min(all_speeds) <= 0:
            return
        parts = by_speed(self._batches.batch_size, all_speeds, LEAST)
        if _slowest_s(parts, all_speeds) <= WORTHWHILE * _slowest_s(self._parts, all_speeds):
            self._parts = parts
            self._batches.split_by(all_speeds)


def _slowest_s(parts: list[int], speeds: list[float]) -> float:
    """Return the seconds until the last rank has computed its part."""
    return max(part / speed for part, speed in zip(parts, speeds, strict=True))
