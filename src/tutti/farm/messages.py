"""Messages between the coordinator's process and the ranks of its blocks. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tutti.run.train_job import TrainJob


@dataclass(frozen=True)
class BlockReady:
    """The ranks of the block have met."""


@dataclass(frozen=True)
class TrainTask:
    """Train. The ranks answer with an `EpochOver` for each epoch and a `JobOver` at the end.

    Their output goes to `log`. If it `asks`, rank 0 waits for a bool after each epoch: whether to end.
    """

    block: int
    job: TrainJob
    log: Path
    asks: bool = False
