"""The losses of ranks that a run has survived: how many, and how often they come. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import PeerLost, RankHung

HOUR_S: Final = 3600.0

LAST: Final = 4
"""The number of losses whose mean distance says how soon the next one is to be expected."""


IN_VAIN: Final = 3
"""So many times in a row may a run hang behind the same copy of its state."""


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
        self._hung_behind: list[int] = []

    def note(self, lost: PeerLost) -> None:
        """Count one.

        Raises:
            PeerLost: it is one too many, or would come again.
        """
        self._note_hang(lost)
        now = self._now()
        self._times.append(now)
        recent = sum(now - one < HOUR_S for one in self._times)
        if recent > self._most:
            raise lost.adding(f"it was loss {recent} within an hour") from lost
        since = [self._began, *self._times][-1 - LAST :]
        self._memory.note_loss((since[-1] - since[0]) / (len(since) - 1))

    def _note_hang(self, lost: PeerLost) -> None:
        if not isinstance(lost, RankHung):
            self._hung_behind = []
            return
        step = next((found["step"] for _, found in self._memory.place.described()), 0)
        self._hung_behind.append(step)
        last = self._hung_behind[-IN_VAIN:]
        if last == [step] * IN_VAIN:
            raise lost.adding(
                f"{IN_VAIN} times in a row it hung behind step {step:,}: the program itself may wait for "
                "something that does not come, or hosts that this one reaches may not reach each other"
            ) from lost
