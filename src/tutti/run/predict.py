"""The predictions of a trained model for the samples of a data set, in a file. Runs on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tutti.comm.base import Communicator
from tutti.data import Part, Scale
from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Inputs
from tutti.data.opening import open_inputs
from tutti.data.sources import with_columns
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

    Memory holds all inputs, unless they are streamed, and some outputs at a time.
    """
    with seeded(job.config.seed), keeping_doubles(predictor.is_double):
        name, part = (_other if job.other_data else _own)(job, comm, predictor)
        part = predictor.given(part)
    path, data, arithmetic = Path(job.out), predictor.data, Arithmetic(device=job.config.device)
    meaning = Meaning(predictor.kind, data.classes, data.labels)
    with PredictionFile(path, len(part), meaning) if comm.rank == 0 else nullcontext() as file:
        for start in range(0, len(part), PASS * AT_ONCE):
            stop = min(start + PASS * AT_ONCE, len(part))
            block = SampleBlock(stop - start, partial(_take, part, start))
            outputs = outputs_of(predictor, block, comm, arithmetic)
            if file is not None and outputs is not None:
                rows = torch.arange(start, stop) if part.rows is None else part.rows[start:stop]
                floats = np.float64 if outputs.dtype == torch.float64 else np.float32
                with refusing(path):
                    file.append(rows.numpy(), predictor.kind.values(outputs.numpy()), floats)
    if comm.rank == 0:
        print(f"{path}: the predictions for {len(part):,} samples, {name}", flush=True)


AT_ONCE: Final = 64
"""The passes whose outputs are kept until they are written."""


def _other(job: PredictJob, comm: Communicator, predictor: Predictor) -> tuple[str, Part]:
    """Return a part of other data than the run's, and its name."""
    data = predictor.data
    options = with_columns(job.config.data, job.config.data_options, data.columns)
    if data.fill:
        options.setdefault("missing", "mean")
    found = open_inputs(job.config.data, comm, options, job.part)
    columns = () if "columns" in job.config.data_options else found.columns
    return found.name, aligned(found.name, found.train, columns, data)


def _own(job: PredictJob, comm: Communicator, predictor: Predictor) -> tuple[str, Part]:
    """Return a part of the run's own data, and its name."""
    dataset = open_config_data(job, comm)
    name = job.part or "test"
    part = aligned(dataset.name, part_named(dataset, name), (), predictor.data)
    return f"{name} part of {dataset.name}", part.with_rows(part.rows, Scale())


def _take(part: Part, start: int, first: int, last: int) -> Inputs:
    return part.take(torch.arange(start + first, start + last))[0]
