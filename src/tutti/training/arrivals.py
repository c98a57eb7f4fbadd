"""The order in which workers come to the exchange of each step.

A delay of one worker hides in the exchange, where all others wait for it. So each notes how long it takes
from the end of one exchange to the beginning of the next one, and at the end of an epoch they compare:

    rank 0   own 1 │ exchange ....... │ own 2 │ exchange ....... │      last in  0 of 2 steps
    rank 1   own 1          │ exchange│ own 2          │ exchange│      last in  2 of 2
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tutti.records.run import RankRecord

MOST: Final = 4096
"""The steps of an epoch that are compared, the first ones."""


class Arrivals:
    """The seconds that this rank takes to come to each step's exchange, since they were last taken."""

    def __init__(self) -> None:
        self._seconds = array("f")

    def note(self, seconds: float) -> None:
        """Note a step."""
        if len(self._seconds) < MOST:
            self._seconds.append(seconds)

    def take(self) -> bytes:
        """Return what was noted, for `compared`."""
        taken, self._seconds = self._seconds.tobytes(), array("f")
        return taken


def compared(ranks: Sequence[tuple[RankRecord, bytes]]) -> list[RankRecord]:
    """Complete the records of an epoch by who came last, and how long each took.

    Args:
        ranks: for each its record, and what its `Arrivals` has noted.
    """
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
