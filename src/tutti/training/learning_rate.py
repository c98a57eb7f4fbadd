"""The learning rate of a run, and the steps of its schedule."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tutti.errors import BadOption
from tutti.object_state import as_values, load_state_of, state_of
from tutti.optim.sharded import announce
from tutti.optim.state import options_of
from tutti.records.run import EpochRecord
from tutti.state import Values


class LearningRate:
    """The learning rate of a run's updates; its schedule has made `stepped` steps."""

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler | None, stepped: int) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._plateau = schedule if isinstance(schedule, ReduceLROnPlateau) else None
        self._each_update = schedule if self._plateau is None else None
        self._stepped = stepped

    @property
    def value(self) -> float:
        """The rate of the first group of parameters."""
        return cast("float", self._optimizer.param_groups[0]["lr"])

    def step_until(self, updates: int) -> None:
        """Step the schedule to its state after `updates` updates."""
        while self._each_update is not None and self._stepped < updates:
            self._each_update.step()
            self._stepped += 1

    def note(self, record: EpochRecord) -> None:
        """Step a schedule that follows the loss, by an epoch's validation if there is one."""
        if self._plateau is not None:
            self._plateau.step((record.validation or record.train).loss)

    def state(self) -> Values:
        """Return the state of the schedule and the optimizer's options."""
        kept: Any = {} if self._schedule is None else None  # None: it is stepped again from the start
        if hasattr(self._schedule, "state_dict"):
            with suppress(BadOption):
                kept = state_of(self._schedule, "schedule")
        options = as_values(options_of(self._optimizer), "the optimizer's param_groups")
        return {"made": self._stepped, "state": kept, "options": options}

    def load_state(self, at: Values, steps: int, alike: bool = True) -> None:
        """Continue after `made` updates, from an earlier state if the run is `alike` in length."""
        if self._schedule is None:
            return
        # A schedule that has made steps before the run was interrupted needs no warning.
        announce(self._optimizer)
        # A schedule that follows the loss does not depend on the length of the run.
        if (alike or self._plateau is not None) and at["state"] is not None:
            self._stepped = at["made"]
            load_state_of(self._schedule, at["state"])
        else:
            self.step_until(steps)
