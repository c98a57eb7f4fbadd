"""A look at the samples of a study, and at what is to be trained on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from tutti import models
from tutti.data.columns import Stored
from tutti.data.contents import Contents
from tutti.data.pool import BY_NUMBER, PoolOutline
from tutti.data.rows import Array, Rows
from tutti.data.sources import read_source
from tutti.data.streaming.options import without_stream
from tutti.errors import UserError
from tutti.farm.jobs import FarmJob
from tutti.run.build import given_data, seeded
from tutti.run.checks import check_recipe
from tutti.run.pickled import Pickled
from tutti.run.start import check_files
from tutti.run.train_job import TrainJob


@dataclass(frozen=True)
class Samples:
    """Facts about a data set that splits need.

    Attributes:
        name: of the data set.
        targets: of the training samples.
        labels: the classes' names; empty when unknown.
        fingerprint: tells the samples from those of other data.
        groups: of the training samples; None: no column of the data has them.
    """

    name: str
    targets: NDArray[Any]
    labels: tuple[str, ...]
    fingerprint: str
    groups: NDArray[Any] | None = None


def look_at(
    jobs: Sequence[FarmJob], block: int, contents: Contents[Stored[Rows], Array] | None = None
) -> Samples:
    """Check the runs of a study, and look at the targets of their data."""
    # Arrays that were read already are no file yet that could be looked for.
    known = {} if contents is None else {"data": Pickled(b"")}
    runs = []
    for one in jobs:
        check_files(one.config)
        config = replace(one.config, workers=str(max(1, block - one.config.servers)))
        runs.append(TrainJob(config, objects=one.objects | known))
    for run in runs:
        check_recipe(run, block)
    if contents is None:
        with seeded(runs[0].config.seed):
            given, options = given_data(runs[0])
            contents = read_source(given, without_stream(given, options, BY_NUMBER))
    outline = PoolOutline.of(contents)
    for run in runs:
        _refuse_unfit(run, outline)
    _, targets = contents.parts["train"]
    return Samples(outline.name, targets, outline.labels, outline.fingerprint, contents.groups)


def _refuse_unfit(job: TrainJob, outline: PoolOutline) -> None:
    """Refuse a model with options that it does not have, or that is not for such inputs."""
    outputs = outline.classes or max(1, math.prod(outline.target_shape))
    with seeded(job.config.seed):
        try:
            models.build(job.given("model"), outline.shape, outputs, job.config.model_options)
        except UserError:
            raise
        except Exception:
            # The program's own error: its jobs fail by it, with the traceback in their folders.
            return
