"""The points of a run within its epochs, for its curves: see `PointRecord`."""

from __future__ import annotations

import math
import sys
from typing import Final

from typing_extensions import override

from tutti.errors import DiskFull
from tutti.records.run import PointRecord
from tutti.records.run_folder import RunFolder
from tutti.records.texts import RunLength
from tutti.training.progress import Moment, Progress

EVERY_S: Final = 2.0
"""Seconds between the first points."""

MANY: Final = 250
"""Points after which the seconds between two of them double, again and again: a year has some thousand."""


class Points(Progress):
    """Writes a point every few seconds; those of a run that goes on follow those before its checkpoint.

    If there is no room for one, that is said, and there are no more.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._count, self._full = folder, 0, False
        self.every_s = EVERY_S

    @override
    def begin(self, span: RunLength, step: int = 0) -> None:
        """Take back the points after `step`, which were of another course of the run."""
        self._set(self._folder.keep_points(step))

    @override
    def moment(self, moment: Moment) -> None:
        """Write a point."""
        if self._full or not (moment.train.samples and math.isfinite(moment.seconds)):
            return
        try:
            self._folder.append_point(PointRecord(moment.epoch, moment.step, moment.seconds, moment.train))
        except DiskFull as error:
            self._full = True
            print(f"tutti: warning: {error}; the curves have no more points", file=sys.stderr, flush=True)
        else:
            self._set(self._count + 1)

    def _set(self, count: int) -> None:
        self._count, self.every_s = count, EVERY_S * 2 ** (count // MANY)
