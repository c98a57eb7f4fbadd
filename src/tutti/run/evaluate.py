"""Evaluation of a trained model. Runs on every rank."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tutti.comm.base import Communicator
from tutti.data import DataSet
from tutti.data.sources import with_columns
from tutti.data.targets import KnownClasses
from tutti.errors import BadData
from tutti.exports.sources import load_from
from tutti.records.run import Evaluation
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run import summary_lines
from tutti.run.build import open_config_data, prepare_task, seeded
from tutti.run.jobs import load_job
from tutti.run.train_job import PARTS, EvaluateJob
from tutti.run.trained import dtype_of, in_columns, refuse_other_inputs, scale_seen


def work(comm: Communicator, payload: bytes) -> Evaluation:
    """Evaluate; every rank calls this (entry point of the ranks).

    Args:
        comm: all ranks of the job.
        payload: a pickled `EvaluateJob`.

    Returns:
        The evaluation, equal on all ranks.

    Raises:
        UserError: the run folder cannot be read, or the data does not fit the model.
    """
    job = load_job(payload, EvaluateJob)
    if comm.rank == 0:
        for note in job.notes:
            print(f"tutti: warning: {note}", file=sys.stderr, flush=True)
    with seeded(job.config.seed):
        if job.other_data:
            trained = RunFolder(Path(job.folder)).read(TrainedOn)
            options = with_columns(job.config.data, job.config.data_options, trained.columns)
            job = replace(job, config=replace(job.config, data_options=options))
            dataset = seen_as(open_config_data(job, comm, known=known_classes(trained)), trained)
        else:
            dataset = open_config_data(job, comm)
        # Other data of one part are to be evaluated whole.
        whole = job.part is None and job.other_data and dataset.test is None
        name = "train" if whole else job.part or "test"
        if getattr(dataset, name) is None:
            have = ", ".join(name for name in PARTS if getattr(dataset, name) is not None)
            raise BadData(f"{dataset.name} has no {name} part; it has: {have}. Choose one with --part")
        task = prepare_task(job, dataset)
        load_from(Path(job.weights), task.module, comm)
        result = task.evaluate(getattr(task.dataset, name), comm)
    assert result is not None
    if comm.rank == 0:
        what = dataset.name if whole else f"{name} part of {dataset.name}"
        print(summary_lines.evaluation(what, result, dataset.labels), flush=True)
    return result


def seen_as(dataset: DataSet, trained: TrainedOn) -> DataSet:
    """Other data, seen by the model as it saw the data that it was trained on: same scale, same classes.

    Raises:
        BadData: it has another shape, or classes that the model does not know.
    """
    if trained.inputs:
        dataset = dataset.with_parts(partial(in_columns, trained.inputs))
    refuse_other_inputs(dataset.name, dataset.shape, dtype_of(dataset.train), trained)
    here, there = dataset.classes, trained.classes
    if (here is None) != (there is None) or (here or 0) > (there or 0):
        raise BadData(
            f"{dataset.name} has {here or 'no'} classes, but the model was trained on {there or 'none'} "
            f"({trained.name}); give data of the same classes"
        )
    scale = scale_seen(trained)
    scaled = {
        name: replace(part, scale=scale) for name in PARTS if (part := getattr(dataset, name)) is not None
    }
    return replace(dataset, **scaled, classes=trained.classes, labels=trained.labels)


def known_classes(trained: TrainedOn) -> KnownClasses:
    """Return the classes that a model was trained on."""
    return KnownClasses(trained.classes, trained.labels)
