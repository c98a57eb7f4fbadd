"""Jobs of a farm, and where they come from. Needs no torch.

A job is one ordinary training run. The coordinator takes the next one from a source whenever a block is free:

    cross-validation   the first fold of each candidate, then the longest
    search             asks its sampler, and tells it what came out
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
    """One training run of a farm.

    Attributes:
        name: a relative path, such as "lenet/cosine/fold-2".
        config: its configuration; the farm chooses its folder, ranks and threads.
        objects: what was given as Python objects instead of names, as in a `Job`.
        prunable: it asks its source after each epoch whether to end with it.
    """

    name: str
    config: TrainConfig
    objects: dict[str, Pickled] = field(default_factory=dict)
    prunable: bool = False

    @property
    def runs_code(self) -> bool:
        """True if it runs code of the user's, which may leave anything behind in its processes."""
        paths = ("split", "weights", "out")
        named = {name: value for name, value in self.config.as_json().items() if name not in paths}
        return bool(self.objects or code_named(named))


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job: finished, stopped (it can go on) or failed, with why in one line."""

    state: JobState
    seconds: float
    summary: Summary | None = None
    why: str = ""


class JobSource(Protocol):
    """The jobs of a farm, one after the other."""

    def next(self) -> FarmJob | None:
        """Return the next job.

        None: there is none until a running job has a result; if none runs, the farm is done.
        """
        ...

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Hear of an epoch of a running job; return whether the job, if it is prunable, is to end with it."""
        ...

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Hear how a job has ended."""
        ...


def blocks_for(jobs: int, most: int) -> int:
    """Return the fewest blocks that take as few waves for a number of jobs as `most` blocks do.

    Four jobs on three blocks take two waves, as on two blocks, which get the cores of the third as threads.
    """
    if not jobs:
        return 1
    waves = -(-jobs // most)
    return -(-jobs // waves)
