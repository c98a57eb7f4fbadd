"""The times at which the state is copied in memory, from which lost ranks are replaced.

Copies cost time, and so do the steps since the last one, which are made again. Between two losses, M seconds
apart in the mean, copies that take C seconds cost least with sqrt(2 C M) seconds between them. Before ranks
were ever lost they take a fixed, small share of the time.

Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.005
"""The largest share of the time that copies take, while no rank was lost."""

MAPPING: Final = 2
"""The number of first copies, which take turns at two places and map the memory of these."""

MAPPED_S: Final = 0.5
"""The longest time from one of those to the next copy."""

RECENT: Final = 5
"""The number of copies of which the fastest counts: a busy machine makes some of them slow."""


class CopyTimes:
    """Tells when a copy is due.

    Args:
        loss_every_s: the mean time between losses of ranks, so far, in seconds; None: none was lost.
        asked: tells whether one is wanted now; cheap enough for every step.
    """

    def __init__(self, loss_every_s: float | None, asked: Callable[[], bool] = lambda: False) -> None:
        self._loss_every_s, self._asked = loss_every_s, asked
        self._made = 0
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def note(self, seconds: float) -> None:
        """Note how long the ranks stood still for a copy."""
        self._made += 1
        self._seconds.append(seconds)

    @property
    def pause_s(self) -> float:
        """The time from the last copy, or from the beginning, to the next one, in seconds."""
        if not self._seconds or self._asked():
            return 0.0
        cost_s = min(self._seconds)
        pause_s = cost_s / SHARE
        if self._loss_every_s is not None:
            pause_s = min(pause_s, math.sqrt(2 * cost_s * self._loss_every_s))
        return min(pause_s, MAPPED_S) if self._made <= MAPPING else pause_s
