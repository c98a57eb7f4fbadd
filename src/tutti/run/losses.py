"""The losses of ranks that a run has survived: how many, and how often they come. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import PeerLost

HOUR_S: Final = 3600.0

LAST: Final = 4
"""The number of losses whose mean distance says how soon the next one is to be expected."""


class Losses:
    """The losses of one run.

    Args:
        most: so many within an hour are survived.
        memory: of the run, whose ranks are told.
        now: the clock, in seconds.
    """

    def __init__(self, most: int, memory: StateMemory, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._memory, self._now = most, memory, now
        self._began, self._times = now(), list[float]()

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._times)

    def note(self, lost: PeerLost) -> None:
        """Count one.

        Raises:
            PeerLost: it is one too many.
        """
        now = self._now()
        self._times.append(now)
        recent = sum(now - one < HOUR_S for one in self._times)
        if recent > self._most:
            raise lost.adding(f"it was loss {recent} within an hour") from lost
        since = [self._began, *self._times][-1 - LAST :]
        self._memory.note_loss((since[-1] - since[0]) / (len(since) - 1))
