"""Evaluation of a trained model. Runs on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tutti.comm.base import Communicator
from tutti.data.columns import Columns, columns_of, sequences_in
from tutti.data.parts import DataSet, Part, Scale
from tutti.data.preparation import prepared
from tutti.data.sources import like_training
from tutti.data.targets import KnownClasses
from tutti.errors import BadData
from tutti.exports.sources import load_from
from tutti.records.preparation import Table, table_of
from tutti.records.run import Evaluation
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run import summary_lines
from tutti.run.build import open_config_data, prepare_task, seeded
from tutti.run.config import OBJECT
from tutti.run.jobs import Recipe, load_job
from tutti.run.train_job import PARTS, EvaluateJob


def work(comm: Communicator, payload: bytes) -> Evaluation:
    """Evaluate, with the same result on all ranks (entry point of the ranks)."""
    job = load_job(payload, EvaluateJob)
    with seeded(job.config.seed):
        folder = RunFolder(Path(job.folder))
        trained, options = folder.read(TrainedOn), folder.config()["data_options"]
        dataset = open_seen(job, comm, trained, job.other_data, target=options.get("target"))
        # Other data of one part are to be evaluated whole.
        whole = job.part is None and job.other_data and dataset.test is None
        name = "train" if whole else job.part or "test"
        part_named(dataset, name)
        task = prepare_task(job, dataset, trained)
        load_from(Path(job.weights), task.module, comm.rank == 0)
        result = task.evaluate(part_named(task.dataset, name), comm)
    assert result is not None
    if comm.rank == 0:
        what = dataset.name if whole else f"{name} part of {dataset.name}"
        if (weight := options.get("weight")) is not None and "weight" not in job.config.data_options:
            print(f"unweighted: the training had --data.weight {weight}; give it for weights of these data")
        print(summary_lines.evaluation(what, result, dataset.labels), flush=True)
    return result


def open_seen(
    recipe: Recipe,
    comm: Communicator,
    trained: TrainedOn,
    other: bool = True,  # the data may be others than it was trained on
    table: Table | None = None,  # what the model takes; None: what its preparation says
    target: object = None,  # the option "target" of the training
) -> DataSet:
    """Open the data of a configuration as a model sees them (collective)."""
    config, options = recipe.config, None
    if table is None and trained.preparation is not None:
        table = table_of([trained.preparation])
    as_before = config.split is not None or not (other or trained.labels)
    # An object is no file; the error for it follows below.
    if not config.data.startswith(OBJECT) and not (as_before and table is not None):
        columns = () if as_before else trained.columns
        options = like_training(config.data, config.data_options, columns, table, target)
    if as_before:
        return seen_as(open_config_data(recipe, comm, options=options, trained=trained), trained)
    known = KnownClasses(trained.classes, tuple(map(str, trained.labels)))
    dataset = open_config_data(recipe, comm, known=known, options=options, trained=trained)
    return seen_as(dataset, trained, "columns" in config.data_options)


def seen_as(dataset: DataSet, trained: TrainedOn, chosen: bool = False) -> DataSet:
    """Give other data the scale and the classes of a model's training data."""
    columns = () if chosen else dataset.columns
    if trained.preparation is None:
        dataset = dataset.with_parts(lambda part: aligned(dataset.name, part, columns, trained))
    here, there = dataset.classes, trained.classes
    if (here is None) != (there is None) or (here or 0) > (there or 0):
        raise BadData(
            f"{dataset.name} has {here or 'no'} classes, but the model was trained on {there or 'none'} "
            f"({trained.name}); give data of the same classes"
        )
    scale = scale_seen(trained, dataset.table)
    dataset = dataset.with_parts(lambda part: replace(part, scale=scale))
    named = trained.columns if columns else dataset.columns
    return replace(dataset, columns=named, classes=trained.classes, labels=trained.labels)


def scale_seen(trained: TrainedOn, table: Table | None = None) -> Scale:
    """Return the scale of a model's inputs in training; `table` has the columns of other data."""
    if trained.preparation is not None:
        if table is None:
            raise no_table(trained)
        return prepared(trained.preparation, table)
    each = tuple(Scale(one.mean, one.std, one.fill) for one in trained.inputs)
    return Scale(trained.mean, trained.std, trained.fill, each)


def no_table(trained: TrainedOn) -> BadData:
    """Return the error for data without names, for a model that needs the columns of a table."""
    names = () if trained.preparation is None else trained.preparation.names
    return BadData(
        f"the model was trained on the columns {', '.join(names[:10])} of a table; give a table or a frame "
        "that has them"
    )


def part_named(dataset: DataSet, name: str) -> Part:
    """Return the part of a data set called "train", "validation" or "test"."""
    part: Part | None = getattr(dataset, name)
    if part is None:
        have = ", ".join(one for one in PARTS if getattr(dataset, one) is not None)
        raise BadData(f"{dataset.name} has no {name} part; it has: {have}. Choose one with --part")
    return part


def aligned(name: str, part: Part, columns: Sequence[str], trained: TrainedOn) -> Part:
    """Return a part of other data, called `name`, with its several inputs in the order of training.

    `columns` are the names of the columns of a table; empty: it has none, or the user has chosen them.
    """
    there = trained.columns
    if columns and there and not there[0].isdecimal() and tuple(columns) != tuple(there):
        raise BadData(
            f"{name} has the inputs {', '.join(columns[:10])}, but the model was trained on "
            f"{', '.join(there[:10])}; give these, in this order"
        )
    if trained.inputs:
        part = _in_columns(trained, part)
    stored = part.stored_inputs
    known = trained.dtype or ("uint8" if trained.mean else "")
    here = "" if isinstance(stored, Columns) else str(stored.dtype).removeprefix("torch.")
    if here and known and _kind(here) != _kind(known):
        hint = ", from 0 to 255" if known == "uint8" else ""
        raise BadData(
            f"the inputs of {name} are {here}, but the model was trained on {known}{hint} ({trained.name}); "
            f"convert them, as by array.astype('{known}')"
        )
    if part.shape != trained.of_inputs:
        raise BadData(
            f"the inputs of {name} have shape {part.shape}, but the model was trained on {trained.of_inputs} "
            f"({trained.name}); give data of that shape"
        )
    return part


def _kind(dtype: str) -> str:
    return "float" if dtype.startswith(("float", "bfloat")) else dtype


def _in_columns(trained: TrainedOn, part: Part) -> Part:
    """Put a model's inputs in its order, and make sequences as long as in training."""
    stored, names = part.stored_inputs, tuple(one.name for one in trained.inputs if one.name)
    columns = columns_of(stored)
    there = stored.names if isinstance(stored, Columns) else ()
    # Of named inputs there may be more than the model takes.
    if not {*names} <= {*there} or (not names and len(columns) != len(trained.inputs)):
        return part
    ordered = [columns[there.index(name)] for name in names] if names else columns
    found = (
        replace(column if column.values is not None else sequences_in(column), longest=one.shape[0])
        if one.sequence
        else column
        for one, column in zip(trained.inputs, ordered, strict=True)
    )
    return replace(part, stored_inputs=Columns(tuple(found), names))
