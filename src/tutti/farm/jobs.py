"""Jobs of a farm, and their sources. Needs no torch.

A job is one ordinary training run. The coordinator takes the next one from a source whenever a block is free:

    cross-validation   the first fold of each candidate, then the longest
    search             asks its sampler, and reports the results to it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tutti.records.farm_folder import JobState
from tutti.records.run import EpochRecord, Summary
from tutti.run.config import TrainConfig
from tutti.run.pickled import Pickled
from tutti.run.trust import code_named


@dataclass(frozen=True)
class FarmJob:
    """One training run of a farm."""

    name: str  # a relative path, such as "lenet/cosine/fold-2"
    config: TrainConfig  # the farm chooses its folder, ranks and threads
    objects: dict[str, Pickled] = field(default_factory=dict)  # as in a `Job`
    prunable: bool = False  # its source decides after each epoch whether it ends

    @property
    def runs_code(self) -> bool:
        """True if it runs the user's own code, which may leave anything behind in its processes."""
        paths = ("split", "weights", "out")
        named = {name: value for name, value in self.config.as_json().items() if name not in paths}
        return bool(self.objects or code_named(named))


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job: finished, stopped (it can be resumed) or failed, with the reason in one line."""

    state: JobState
    seconds: float
    summary: Summary | None = None
    why: str = ""


class JobSource(Protocol):
    """The jobs of a farm, one after the other."""

    def next(self) -> FarmJob | None:
        """Return the next job; None: there is none until a running job has a result."""
        ...

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Note an epoch of a running job; return whether the job, if prunable, ends with it."""
        ...

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Note the end of a job."""
        ...


def blocks_for(jobs: int, most: int) -> int:
    """Return the fewest blocks that need as few waves for a number of jobs as `most` blocks.

    Four jobs on three blocks take two waves, as on two blocks, which get the cores of the third as threads.
    """
    if not jobs:
        return 1
    waves = -(-jobs // most)
    return -(-jobs // waves)
