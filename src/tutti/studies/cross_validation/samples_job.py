"""The job of looking at the samples that are to be split. Needs no torch: the launching process has none."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from numpy.typing import NDArray

from tutti.launch.placement import Placement
from tutti.launch.supervisor import supervise
from tutti.run.jobs import Job
from tutti.run.train_job import TrainJob


@dataclass(frozen=True)
class SamplesJob(Job):
    """The reading of a data set's targets, after the checks of what is to be trained on it.

    Attributes:
        candidates: the runs.
        ranks: of each.
    """

    entry: ClassVar[str] = "tutti.studies.cross_validation.samples:work"

    candidates: tuple[TrainJob, ...]
    ranks: int


@dataclass(frozen=True)
class Samples:
    """Facts about a data set that splits and scores need.

    Attributes:
        name: of the data set.
        targets: of the training samples.
        classes: how many there are; None: the targets are amounts.
        labels: the classes' names; empty when unknown.
        fingerprint: tells the samples from those of other data.
        groups: of the training samples; None: no column of the data has them.
    """

    name: str
    targets: NDArray[Any]
    classes: int | None
    labels: tuple[str, ...]
    fingerprint: str
    groups: NDArray[Any] | None = None


def look_at(job: SamplesJob, threads: int) -> Samples:
    """Look at the samples, in a process that has torch, as the ranks of the farm will: they come from it.

    Args:
        job: what to look at.
        threads: those of a rank of the farm.

    Raises:
        UserError: a candidate has an option that cannot be used, or the data cannot be read.
    """
    return cast("Samples", supervise(job.entry, pickle.dumps(job), Placement(workers=1, threads=threads)))
