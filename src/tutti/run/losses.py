"""The losses of ranks that a run has survived: and their limits. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import BadRunFolder, PeerLost, RankHung
from tutti.records.run_folder import RunFolder

HOUR_S: Final = 3600.0

IN_VAIN: Final = 3
"""So many times in a row a run may hang without having come any further."""


class Losses:
    """The losses of one run.

    Args:
        most: so many within an hour are survived.
        memory: of the run.
        now: the clock, in seconds.
    """

    def __init__(self, most: int, memory: StateMemory, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._memory, self._now = most, memory, now
        self._times = list[float]()
        self._furthest, self._in_vain = -1, 0

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
            raise lost.adding(
                f"it was loss {recent} within an hour, and --max-failures {self._most} allows no more"
            ) from lost

    def _note_hang(self, lost: PeerLost) -> None:
        if not isinstance(lost, RankHung):
            self._in_vain = 0
            return
        step = self._reached()
        self._in_vain = 1 if step > self._furthest else self._in_vain + 1
        self._furthest = max(step, self._furthest)
        if self._in_vain == IN_VAIN:
            raise lost.adding(
                f"{IN_VAIN} times in a row it hung and came no further than step {self._furthest:,}: the "
                "program itself may wait for something that does not come, or hosts that this one reaches "
                "may not reach each other"
            ) from lost

    def _reached(self) -> int:
        """The step that the ranks have come to: that of their last copy, where they tell no other."""
        place, steps = self._memory.place, [0]
        steps += [found["step"] for _, found in place.described()]
        with suppress(BadRunFolder):
            if (folder := place.folder) is not None:
                steps += [beat.step for beat in RunFolder(folder).heartbeats().records]
        return max(steps)
