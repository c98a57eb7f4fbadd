"""A check of the data of a study, and of the models to train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tutti import models
from tutti.data import DataSet, Part
from tutti.data.contents import ReadData
from tutti.data.fitting import preparation_of
from tutti.data.opening import SamplePool
from tutti.data.preparation import prepared
from tutti.data.schemas import reading_shown
from tutti.data.sources import read_source
from tutti.data.targets import meant_by
from tutti.errors import UserError
from tutti.farm.jobs import FarmJob
from tutti.run.build import build_model, given_data, seeded
from tutti.run.checks import check_recipe
from tutti.run.names import check_files
from tutti.run.pickled import Pickled
from tutti.run.train_job import TrainJob
from tutti.training.losses import named_loss
from tutti.training.metrics import named_metrics


@dataclass(frozen=True)
class Samples:
    """Facts about a data set that a study needs."""

    name: str  # of the data set
    targets: NDArray[Any]  # of the training samples
    metrics: tuple[str, ...]  # of the first run
    labels: tuple[str, ...]  # the names of the classes; empty: unknown
    fingerprint: str
    groups: NDArray[Any] | None = None  # of the training samples
    rest: NDArray[np.int64] | None = None  # the samples outside the test part; None: all


def look_at(jobs: Sequence[FarmJob], block: int, contents: ReadData | None = None) -> Samples:
    """Check the runs of a study, and read the targets of their data, unless `contents` are given."""
    # Data given as arrays are not in a file yet.
    known = {} if contents is None else {"data": Pickled(b"")}
    runs = []
    for one in jobs:
        check_files(one.config)
        config = replace(one.config, workers=str(max(1, block - one.config.servers)))
        runs.append(TrainJob(config, objects=one.objects | known))
    for run in runs:
        check_recipe(run, block)
    if contents is None:
        with seeded(runs[0].config.seed), reading_shown(runs[0].config.data):
            given, options = given_data(runs[0])
            contents = read_source(given, options, meant_by(runs[0].config.loss))
    pool = SamplePool.outline(contents)
    for run in runs:
        _refuse_unfit(run, pool.dataset, contents)
    _, targets = contents.parts["train"]
    config, groups, labels = runs[0].config, contents.groups, tuple(map(str, contents.labels))
    numbers = None if groups is None else np.unique(groups, return_inverse=True)[1]
    rest = pool.rows(targets, numbers, config.test, 0.0, config.seed)[0] if config.test else None
    metrics = _metrics_of(runs[0], pool.dataset, targets)
    return Samples(contents.name, targets, metrics, labels, pool.dataset.fingerprint, groups, rest)


def _metrics_of(job: TrainJob, dataset: DataSet, targets: NDArray[Any]) -> tuple[str, ...]:
    train = Part(dataset.train.stored_inputs, torch.tensor(targets))
    dataset = replace(dataset, train=train, validation=None, test=None)
    loss = named_loss(job.given("loss"), dataset, job.config.loss_options)
    return tuple(one.name for one in named_metrics(job.given("metrics"), loss, dataset))


def _refuse_unfit(job: TrainJob, dataset: DataSet, contents: ReadData) -> None:
    """Refuse a model with unknown options, or with other inputs."""
    with seeded(job.config.seed):
        try:
            if contents.table is not None:
                preparation = preparation_of(contents, models.takes_table(job.given("model")))
                assert preparation is not None, "it is of a table"
                train = dataset.train.with_rows(None, prepared(preparation, contents.table))
                dataset = replace(dataset, train=train)
            build_model(job, dataset)
        except UserError:
            raise
        except Exception:
            # An error in the user's code fails its jobs, with the traceback in their folders.
            return
