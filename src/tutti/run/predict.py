"""The predictions of a trained model for the samples of a data set, in a file. Runs on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tutti.comm.base import Communicator
from tutti.data import Part, Scale
from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Inputs, Stored, columns_of
from tutti.data.sources import with_columns
from tutti.data.streaming.options import STREAM
from tutti.data.streaming.part import StreamedPart
from tutti.data.unlabelled import open_inputs
from tutti.records.files import refusing
from tutti.run.build import open_config_data, seeded
from tutti.run.evaluate import aligned, part_named
from tutti.run.jobs import load_job
from tutti.run.prediction_files import Meaning, PredictionFile
from tutti.run.train_job import PredictJob
from tutti.run.trained import Predictor, load_trained
from tutti.run.trained_run import UNUSED, find_run
from tutti.training.precision import Arithmetic
from tutti.training.prediction import PASS, SampleBlock, outputs_of


def work(comm: Communicator, payload: bytes) -> None:
    """Predict; every rank calls this (entry point of the ranks)."""
    job = load_job(payload, PredictJob)
    run = find_run(job.place, job.trust, job.weights, UNUSED)
    write_predictions(job, comm, load_trained(run, job.config.device, warn=comm.rank == 0))


def write_predictions(job: PredictJob, comm: Communicator, predictor: Predictor) -> None:
    """Write what a model predicts into the job's file (collective); rank 0 writes.

    Memory holds some samples at a time, as far as the data's format does not need all of them.
    """
    with seeded(job.config.seed), keeping_doubles(predictor.is_double):
        name, samples, blocks = (_other if job.other_data else _own)(job, comm, predictor)
    path, data, arithmetic = Path(job.out), predictor.data, Arithmetic(device=job.config.device)
    meaning = Meaning(predictor.kind, data.classes, data.labels)
    done = 0
    with PredictionFile(path, samples, meaning) if comm.rank == 0 else nullcontext() as file:
        for rows, block in blocks:
            outputs = outputs_of(predictor, block, comm, arithmetic)
            if file is not None and outputs is not None:
                floats = np.float64 if outputs.dtype == torch.float64 else np.float32
                with refusing(path):
                    file.append(rows.numpy(), predictor.kind.values(outputs.numpy()), floats)
            done += block.samples
    if comm.rank == 0:
        print(f"{path}: the predictions for {done:,} samples, {name}", flush=True)


AT_ONCE: Final = 64
"""The passes whose outputs are kept until they are written."""

Blocks = Iterator[tuple[torch.Tensor, SampleBlock]]
"""Blocks of samples, each with their numbers."""


def _other(job: PredictJob, comm: Communicator, predictor: Predictor) -> tuple[str, int, Blocks]:
    """Other data than the run's: its name, how many samples it has, and these."""
    data = predictor.data
    options = with_columns(job.config.data, job.config.data_options, data.columns)
    if data.fill:
        options.setdefault("missing", "mean")
    stream = open_inputs(job.config.data, comm, options, job.part)
    found = stream.outline
    columns = () if "columns" in job.config.data_options else found.columns

    def part_of(stored: Stored[torch.Tensor], samples: int) -> Part:
        targets = torch.zeros(samples, device=columns_of(stored)[0].rows.device)
        return aligned(found.name, Part(stored, targets), columns, data)

    part_of(found.inputs, found.samples)  # refuses others before the file is begun

    def blocks() -> Blocks:
        start = 0
        for stored in stream.blocks(PASS):
            count = len(columns_of(stored)[0].rows)
            part = predictor.given(part_of(stored, count))
            yield torch.arange(start, start + count), SampleBlock(count, partial(_take, part, 0))
            start += count

    what = found.name if found.part is None else f"{found.part} part of {found.name}"
    return what, found.samples, blocks()


def _own(job: PredictJob, comm: Communicator, predictor: Predictor) -> tuple[str, int, Blocks]:
    """A part of the run's own data, with the numbers of the samples in it."""
    if job.config.data_options.get(STREAM) is True:
        # Samples of memory are asked for by their numbers; those in files know theirs.
        job = replace(job, config=replace(job.config, predictions=False))
    dataset = open_config_data(job, comm)
    name = job.part or "test"
    part = aligned(dataset.name, part_named(dataset, name), (), predictor.data)
    stored = predictor.given(replace(part, scale=Scale()))

    def blocks() -> Blocks:
        size = PASS * AT_ONCE
        for start in range(0, len(part), size):
            stop = min(start + size, len(part))
            yield _numbers(part, start, stop), SampleBlock(stop - start, partial(_take, stored, start))

    return f"{name} part of {dataset.name}", len(part), blocks()


def _numbers(part: Part, start: int, stop: int) -> torch.Tensor:
    """Return the numbers of some samples of a part in the data that it is of."""
    positions = torch.arange(start, stop)
    if isinstance(part, StreamedPart):
        return part.numbers(positions)
    return positions if part.rows is None else part.rows[start:stop]


def _take(part: Part, start: int, first: int, last: int) -> Inputs:
    return part.take(torch.arange(start + first, start + last))[0]
