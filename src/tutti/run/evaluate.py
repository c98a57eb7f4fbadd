"""Evaluation of a trained model. Runs on every rank."""

from __future__ import annotations

import sys
from dataclasses import replace
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
from tutti.run.config import OBJECT
from tutti.run.jobs import Recipe, load_job
from tutti.run.seen import aligned, part_named, scale_seen
from tutti.run.train_job import EvaluateJob


def work(comm: Communicator, payload: bytes) -> Evaluation:
    """Evaluate; every rank calls this (entry point of the ranks).

    Returns:
        The evaluation, equal on all ranks.
    """
    job = load_job(payload, EvaluateJob)
    if comm.rank == 0:
        for note in job.notes:
            print(f"tutti: warning: {note}", file=sys.stderr, flush=True)
    with seeded(job.config.seed):
        trained = RunFolder(Path(job.folder)).read(TrainedOn)
        dataset = open_seen(job, comm, trained, job.other_data)
        # Other data of one part are to be evaluated whole.
        whole = job.part is None and job.other_data and dataset.test is None
        name = "train" if whole else job.part or "test"
        part_named(dataset, name)
        task = prepare_task(job, dataset, trained)
        load_from(Path(job.weights), task.module, comm)
        result = task.evaluate(part_named(task.dataset, name), comm)
    assert result is not None
    if comm.rank == 0:
        what = dataset.name if whole else f"{name} part of {dataset.name}"
        print(summary_lines.evaluation(what, result, dataset.labels), flush=True)
    return result


def open_seen(recipe: Recipe, comm: Communicator, trained: TrainedOn, other: bool = True) -> DataSet:
    """Open the data of a configuration as a model sees them (collective)."""
    config = recipe.config
    if config.split is not None or not (other or trained.labels):
        return seen_as(open_config_data(recipe, comm), trained)
    if not config.data.startswith(OBJECT):  # which is no file; why it is not there is said below
        options = with_columns(config.data, config.data_options, trained.columns)
        recipe = replace(recipe, config=replace(config, data_options=options))
    found = open_config_data(recipe, comm, known=KnownClasses(trained.classes, trained.labels))
    return seen_as(found, trained, "columns" in config.data_options)


def seen_as(dataset: DataSet, trained: TrainedOn, chosen: bool = False) -> DataSet:
    """Give other data the scale and the classes of the data that a model was trained on."""
    columns = () if chosen else dataset.columns
    dataset = dataset.with_parts(lambda part: aligned(dataset.name, part, columns, trained))
    here, there = dataset.classes, trained.classes
    if (here is None) != (there is None) or (here or 0) > (there or 0):
        raise BadData(
            f"{dataset.name} has {here or 'no'} classes, but the model was trained on {there or 'none'} "
            f"({trained.name}); give data of the same classes"
        )
    scale = scale_seen(trained)
    dataset = dataset.with_parts(lambda part: replace(part, scale=scale))
    named = trained.columns if columns else dataset.columns
    return replace(dataset, columns=named, classes=trained.classes, labels=trained.labels)
