"""The heartbeats that the ranks of a run write into its folder. Needs neither torch nor MPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tutti.records.json_lines import Record

EVERY_S: Final = 1.0
"""Seconds between two heartbeats of a rank."""

MOMENT_S: Final = 3.0
"""Seconds in one operation with others up to which it is not worth a word."""

STARTING: Final = "starting"
TRAINING: Final = "training"
WAITING: Final = "waiting for others"
VALIDATING: Final = "validating"
TESTING: Final = "testing"
SAVING: Final = "saving"
FINISHED: Final = "finished"
FAILED: Final = "failed"


@dataclass(frozen=True)
class Heartbeat(Record):
    """A sign of life of a rank, with its progress.

    Times are seconds since 1970 (UTC), by the clock of the rank's host.
    """

    rank: int  # its number among the workers
    host: str
    process: int
    time: float  # of this heartbeat
    state: str = STARTING  # one of the names above
    began: float | None = None  # the time when it began to train; None before
    moved: float = 0.0  # the time of its last known progress, which is checked about once a second
    epoch: int = 0  # the current epoch, from 1; 0 before
    step: int = 0  # weight updates since the run began, as in `tutti.records.run.EpochRecord`
    updates: int = 0  # the last step of the run; 0 before it trains
    per_epoch: int = 0  # updates of one epoch
    counted: int = 0  # as in `tutti.records.texts.RunLength`
    steps_per_s: float = 0.0  # recent updates per second
    samples_per_s: float = 0.0  # recent training samples of this rank per second
    # the operation in which it waited for other ranks or exchanged something with them, with its caller, such
    # as "barrier (tutti.strategies.sync:120)"; empty: none
    waits: str = ""
    error: str | None = None  # the error that it failed with, in one line; None if it has not failed

    @property
    def doing(self) -> str:
        """The state for people; for a longer wait, with the operation."""
        long = self.state == TRAINING and self.waits and self.time - self.moved > MOMENT_S
        return f"waiting ({self.waits.partition(' ')[0]})" if long else self.state
