"""The times at which a run saves its state, or stops: all ranks agree on them, between two steps.

Workers that step together vote every few steps, in the same step:

    rank 0   step │ step │ vote │ step │ step │ vote: save │ settle, save, resume │ step
    rank 1   step │ step │ vote │ step │ step │ vote: save │ settle, save, resume │ step

Workers that do not wait for each other read a counter instead. A rank that wants a meeting adds to
it, and the others come when they see that:

    rank 0   step │ step, add │ comes │ settle, vote: save, resume │ step
    rank 1   step  │   step    │  step   │ looks, comes │ settle, vote: save, resume │ step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import torch

from tutti.comm.base import Communicator
from tutti.training.intervals import Every

LOOK_S: Final = 0.1
"""The seconds between two votes, about."""

MOST_STEPS: Final = 100
"""The most steps between two votes: the next ones may take longer than the measured ones."""

COPY_SHARE: Final = 0.005
"""The largest share of the time that copies in memory take."""

NEW_MEMORY: Final = 2
"""The first copies, which are slow as their memory is new: copies take turns in two places."""

LOOK_STEPS: Final = 4
"""Steps between two looks at the counter."""


@dataclass(frozen=True)
class Wishes:
    """The reasons for a meeting, apart from the number of steps."""

    every: Every | None = None  # the interval between checkpoints; None: only one at a stop
    copies: Callable[[], bool] | None = None  # returns whether to copy in memory now; None: there are none
    end: bool = False  # the end of the run is a checkpoint too, even if it has none before
    stop: Callable[[], str | None] = lambda: None  # why this rank was asked to stop; None: it was not
    free: bool = False  # the workers do not wait for each other
    period: int = 1  # the steps between two exchanges of workers that go abreast
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Decision:
    """The decision of a meeting, the same on all ranks."""

    save: bool  # the state is to be saved
    copy: bool = False  # it is to be copied in memory
    stop: str | None = None  # why the run stops here, to be resumed later; None: it goes on
    end: bool = False  # the run is over

    @property
    def final(self) -> bool:
        """True if nothing is trained after this."""
        return self.stop is not None or self.end


class Agenda:
    """The meetings of a run's ranks (collective)."""

    def __init__(self, comm: Communicator, wishes: Wishes) -> None:
        self._comm, self._wishes = comm, wishes
        self.free = wishes.free
        self._counter = comm.counter() if wishes.free else None
        self._seen, self._asked = 0, False
        self._has_saved = False
        self._copies, self._copy_s = 0, math.inf
        self._reason: str | None = None
        self.start(0, 0)

    def start(self, step: int, epoch: int) -> None:
        """Begin with a rank that has made `step` updates and `epoch` complete epochs."""
        now = self._wishes.now()
        self._saved_step, self._saved_epoch, self._saved_at, self._copied_at = step, epoch, now, now
        self._looked_at, self._looked_step = now, step
        self._look_after(step, LOOK_STEPS if self.free else 1)

    def calls(self, step: int) -> bool:
        """Return whether the ranks meet after `step` updates of this rank."""
        if step < self._next:
            return False
        return self._look(step) if self._counter is None else self._count(step)

    def decide(self, step: int, epoch: int) -> Decision:
        """Decide, when the ranks have met, after `step` updates and `epoch` complete epochs (collective)."""
        stops, saves, copies = self._wants_stop(), self._wants_save(step, epoch), self._wants_copy()
        votes = torch.tensor([float(stops), float(saves), float(copies)])
        self._comm.all_reduce(votes)
        if self._counter is not None:
            # Every rank that has added is here, and none adds before all have read.
            self._seen, self._asked = self._counter.add(0), False
            self._comm.barrier()
        stop, save, copy = (bool(vote) for vote in votes.tolist())
        if save or stop:
            self._has_saved = True
            self.start(step, epoch)
        # Rank 0 may not know another rank's reason yet.
        reasons = self._comm.all_gather_objects(self._reason) if stop else []
        return Decision(save or stop, copy, cast("str | None", next(filter(None, reasons), None)))

    def note_copy(self, seconds: float) -> None:
        """Note the time of a meeting with a copy in memory."""
        self._copied_at = self._wishes.now()
        self._copies += 1
        if self._copies > NEW_MEMORY:
            # A busy machine makes some copies slow.
            self._copy_s = min(seconds, self._copy_s)

    def keeps_end(self, early: bool) -> bool:
        """Return whether to save the state at the end of the run; the same on all ranks."""
        kept = early or self._wishes.end or self._has_saved
        return self._wishes.every is not None and kept

    def _wants_stop(self) -> bool:
        self._reason = self._reason or self._wishes.stop()
        return self._reason is not None

    def _wants_save(self, step: int, epoch: int) -> bool:
        every = self._wishes.every
        if every is None or (every.seconds is not None and self._comm.rank):
            return False  # Clocks differ: rank 0's counts.
        passed = self._wishes.now() - self._saved_at
        return every.is_over(passed, step - self._saved_step, epoch - self._saved_epoch)

    def _wants_copy(self) -> bool:
        wanted = self._wishes.copies
        if wanted is None or self._comm.rank:
            return False
        passed = self._wishes.now() - self._copied_at
        return self._copies <= NEW_MEMORY or passed >= self._copy_s / COPY_SHARE or wanted()

    def _look_after(self, step: int, steps: int) -> None:
        """Look again after `steps` steps, or when the next checkpoint is due."""
        every = self._wishes.every
        self._next = step + steps
        if every is not None and every.steps is not None:
            self._next = min(self._next, max(step + 1, self._saved_step + every.steps))

    def _look(self, step: int) -> bool:
        """Vote, and agree on the step of the next vote."""
        now, every = self._wishes.now(), self._wishes.every
        step_s = (now - self._looked_at) / max(1, step - self._looked_step)
        self._looked_at, self._looked_step = now, step
        timed = every is not None and every.seconds is not None
        wanted = self._wants_stop() or self._wants_copy()
        wanted = wanted or (timed and self._wants_save(step, self._saved_epoch))
        votes = torch.tensor([float(wanted), step_s])
        self._comm.all_reduce(votes)
        meets, seconds = votes.tolist()
        most = LOOK_STEPS if seconds <= 0 else min(MOST_STEPS, int(LOOK_S * self._comm.size / seconds))
        period = self._wishes.period
        self._look_after(step, max(1, most // period) * period)
        by_steps = every is not None and every.steps is not None and step - self._saved_step >= every.steps
        return bool(meets) or by_steps

    def _count(self, step: int) -> bool:
        """Ask for a meeting if this rank wants one; return whether any rank does."""
        assert self._counter is not None
        self._look_after(step, LOOK_STEPS)
        wanted = self._wants_stop() or self._wants_copy() or self._wants_save(step, self._saved_epoch)
        if wanted and not self._asked:
            self._asked = True
            self._counter.add(1)
            return True
        return self._counter.add(0) != self._seen
