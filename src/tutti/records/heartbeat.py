"""The heartbeats that the ranks of a run write into its folder. Needs neither torch nor MPI.

ranks/0.json    the newest `Heartbeat` of rank 0, replaced about once a second as long as the rank lives
ranks/1.json    ...
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.records.json_lines import JsonLinesFile, Record, parse_record, to_json
from tutti.records.untrusted import MOST_RANKS, read_file

RANKS: Final = "ranks"
"""The folder of the heartbeats, inside the run's."""

EVERY_S: Final = 1.0
"""Seconds between two heartbeats of a rank."""

MOST_BYTES: Final = 1 << 16
"""The size above which a file is no heartbeat."""

STARTING: Final = "starting"
TRAINING: Final = "training"
WAITING: Final = "waiting for others"
VALIDATING: Final = "validating"
TESTING: Final = "testing"
FINISHED: Final = "finished"
FAILED: Final = "failed"


@dataclass(frozen=True)
class Heartbeat(Record):
    """A sign of life of a rank, with its progress.

    Times are seconds since 1970 (UTC), by the clock of the rank's host.

    Attributes:
        rank: its number among the workers.
        host: the name of its host.
        process: its process id there.
        time: of this heartbeat.
        state: one of the names above.
        began: the time when it began to train; None before.
        moved: the time of its last known progress, which is checked about once a second.
        epoch: the epoch that it is in, from 1; 0 before.
        step: weight updates since the run began, as in `tutti.records.run.EpochRecord`.
        updates: of the whole run; 0 before it trains.
        per_epoch: of one epoch.
        steps_per_s: updates per second, lately.
        samples_per_s: training samples of this rank per second, lately.
        waits: whether it was waiting for other ranks, or exchanging something with them.
        error: the error that it failed with, in one line; None if it has not failed.
    """

    rank: int
    host: str
    process: int
    time: float
    state: str = STARTING
    began: float | None = None
    moved: float = 0.0
    epoch: int = 0
    step: int = 0
    updates: int = 0
    per_epoch: int = 0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    waits: bool = False
    error: str | None = None

    def check(self) -> None:
        """Raise ValueError for values that no heartbeat has."""
        if not 0 <= self.rank < MOST_RANKS:
            raise ValueError(f"there is no rank {self.rank}")
        if self.updates and self.per_epoch < 1:
            raise ValueError(f"an epoch of {self.per_epoch} updates is none")
        numbers = (self.time, self.moved, self.began or 0.0, self.steps_per_s, self.samples_per_s)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a time or a rate is not finite")


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    """Replace the rank's last heartbeat by `beat`: readers see the one or the other, and both whole.

    Args:
        folder: the run's; it has the folder `RANKS`.
        beat: the new one.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / RANKS / f"{beat.rank}.json"
    unfinished = path.with_name(f".{path.name}.unfinished")
    # It need not survive a power cut, so it is not flushed to the disk: that would make the rank wait.
    unfinished.write_text(to_json(beat.as_json()) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_heartbeats(folder: Path) -> JsonLinesFile[Heartbeat]:
    """Read the newest heartbeat of each rank that has left one, sorted by rank.

    Args:
        folder: the run's.
    """
    found: JsonLinesFile[Heartbeat] = JsonLinesFile([], [])
    for path in (folder / RANKS).glob("[0-9]*.json"):
        try:
            found.records.append(parse_record(read_file(path, MOST_BYTES), Heartbeat.from_json))
        except FileNotFoundError:  # the run has failed early and taken its files back
            continue
        except OSError as error:
            found.damage.append(f"{path} cannot be read ({error.strerror}); it was left out")
        except ValueError as error:
            found.damage.append(f"{path} is no sign of life ({error}); it was left out")
    found.records.sort(key=lambda beat: beat.rank)
    return found
