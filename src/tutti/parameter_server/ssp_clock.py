"""The workers' clocks, and the bound between them: stale synchronous parallel training.

Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", section 2:
a worker that has made c steps may begin another while no worker has made fewer than c - slack, at weights
that have all updates of the first c - slack steps.

    slack 1   worker 0  │ step │ step │ waits for worker 1's first │ step │
              worker 1  │     step           │      step           │
"""

from __future__ import annotations

from typing import Final

import torch

from tutti.comm.base import Communicator

STEP_TAG: Final = 1 << 19

GONE: Final = 1 << 62
"""The count of a worker that has left."""


class SharedSteps:
    """The workers' counts in shared memory (collective over the host's workers)."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._counts = comm.shared(comm.size, dtype=torch.int64).numpy().data
        # What a sleeping worker waits for: its slack plus one; 0 for one that is awake.
        self._sleeping = comm.shared(comm.size, dtype=torch.int64).numpy().data
        self._lock = comm.lock()
        self._note = torch.zeros(1)

    def tick(self, slack: int) -> float:
        """Count a step; returns the seconds that this worker waited for others."""
        if not self._count(self._counts[self._comm.rank] + 1, slack):
            return 0.0
        came = self._comm.clock()
        self._comm.recv(self._note, tag=STEP_TAG)
        return self._comm.clock() - came

    def leave(self) -> None:
        """Count as a worker that has left."""
        self._count(GONE)

    def rejoin(self) -> None:
        """Count from 0 again."""
        self._count(0)

    def _count(self, count: int, slack: int = GONE) -> bool:
        """Set this worker's count and wake the workers it held up; return whether it must wait."""
        rank = self._comm.rank
        with self._lock:
            self._counts[rank] = count
            slowest = min(self._counts)
            ready = [
                other
                for other, wanted in enumerate(self._sleeping)
                if wanted and self._counts[other] - slowest < wanted
            ]
            for other in ready:
                self._sleeping[other] = 0
            waits = count - slowest > slack
            if waits:
                self._sleeping[rank] = slack + 1
        for other in ready:
            self._comm.send(self._note, other, tag=STEP_TAG)
        return waits
