"""The predictions of a trained model for the samples of a data set, in a file. Runs on every rank.

out.csv, out.parquet    a row for each sample: its number, its class, and the probability of each class
out.npy                 the probabilities alone, or the amounts, of shape (samples, ...)
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data import Part
from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Inputs
from tutti.data.opening import open_inputs
from tutti.data.schemas import reading_shown
from tutti.data.sources import like_training
from tutti.errors import BadData
from tutti.records.files import refusing, unfinished_file
from tutti.records.output_kinds import Kind
from tutti.run.build import open_config_data, seeded
from tutti.run.evaluate import part_named
from tutti.run.jobs import load_job
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
    """Write a model's predictions into the job's file (collective); rank 0 writes, some at a time."""
    with seeded(job.config.seed), keeping_doubles(predictor.is_double):
        name, part = (_other if job.other_data else _own)(job, comm, predictor)
    path, data, arithmetic = Path(job.out), predictor.data, Arithmetic(device=job.config.device)
    meaning = Meaning(predictor.kind, data.classes, data.labels)
    with PredictionFile(path, len(part), meaning) if comm.rank == 0 else nullcontext() as file:
        for start in range(0, len(part), PASS * AT_ONCE):
            stop = min(start + PASS * AT_ONCE, len(part))
            block = SampleBlock(stop - start, partial(_take, part, start))
            outputs = outputs_of(predictor, block, comm, arithmetic)
            if file is not None and outputs is not None:
                floats = np.float64 if outputs.dtype == torch.float64 else np.float32
                with refusing(path):
                    file.append(part.source_rows(start, stop), predictor.kind.values(outputs.numpy()), floats)
    if comm.rank == 0:
        print(f"{path}: the predictions for {len(part):,} samples, {name}", flush=True)


Array = NDArray[Any]

AT_ONCE: Final = 64
"""The passes whose outputs are kept until they are written."""


def _other(job: PredictJob, comm: Communicator, predictor: Predictor) -> tuple[str, Part]:
    """Return a part of other data than the run's, and its name."""
    data = predictor.data
    options = like_training(job.config.data, job.config.data_options, data.columns, predictor.table)
    if data.fill:
        options.setdefault("missing", "mean")
    with reading_shown(job.config.data, comm.rank == 0 and not job.quiet):
        inputs = open_inputs(job.config.data, comm, options, job.part)
    columns = () if "columns" in job.config.data_options else inputs.columns
    return inputs.name, predictor.seen(inputs.name, inputs.train, columns, inputs.table)


def _own(job: PredictJob, comm: Communicator, predictor: Predictor) -> tuple[str, Part]:
    """Return a part of the run's own data, and its name."""
    dataset = open_config_data(job, comm)
    name = job.part or "test"
    part = predictor.seen(dataset.name, part_named(dataset, name), (), dataset.table)
    return f"{name} part of {dataset.name}", part


def _take(part: Part, start: int, first: int, last: int) -> Inputs:
    return part.take(torch.arange(start + first, start + last))[0]


_WIDEST: Final = 2000
"""The most columns of a table."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a model's values."""

    kind: Kind
    classes: int | None
    labels: tuple[Any, ...]  # names of the classes, or empty

    def columns(self, rows: Array, values: Array) -> dict[str, Array]:
        """Return the columns of a table: the numbers of the samples, their classes, and the values."""
        has_class = self.kind is Kind.CLASSES or self.classes is not None
        count = int(np.prod(values.shape[1:]))
        if count > _WIDEST or (values.ndim > 2 and has_class):
            raise BadData(
                f"the model gives values of shape {values.shape[1:]} for each sample, which fit into no "
                "table; name a file that ends in .npy"
            )
        columns: dict[str, Array] = {"row": rows}
        if has_class:
            found = self.kind.classes(values, self.classes)
            columns["class"] = np.array(self.labels)[found] if self.labels else found
        if self.kind is Kind.REGRESSION:
            several = self.labels if len(self.labels) == count else [f"value {at}" for at in range(count)]
            heads = ["value"] if count == 1 else [*several]
        elif count == 1 and self.classes is not None:
            heads = [f"p({self.labels[1] if len(self.labels) > 1 else 1})"]
        else:
            heads = [f"p({one})" for one in (self.labels if len(self.labels) == count else range(count))]
        return columns | dict(zip(heads, values.reshape(len(values), -1).T, strict=True))


class PredictionFile(AbstractContextManager["PredictionFile"]):
    """A file of predictions while it is written; `samples` is their final number."""

    def __init__(self, path: Path, samples: int, meaning: Meaning) -> None:
        self._path, self._samples, self._meaning = path, samples, meaning
        self._unfinished = unfinished_file(path)
        self._stack = ExitStack()
        self._writer: Any = None

    def append(self, rows: Array, values: Array, dtype: type) -> None:
        """Add some samples, by their numbers; `dtype` is the precision that the values have."""
        if self._path.suffix == ".npy":
            self._append_array(np.ascontiguousarray(values, dtype))
            return
        import pyarrow

        columns = self._meaning.columns(rows, values).items()
        table = pyarrow.table({k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in columns})
        if self._writer is None:
            self._writer = self._stack.enter_context(self._table_writer(self._open(), table.schema))
        self._writer.write_table(table)

    def _append_array(self, values: Array) -> None:
        if self._writer is None:
            self._writer = self._open()
            shape = (self._samples, *values.shape[1:])
            head = {"descr": values.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._writer, head)
        self._writer.write(values.tobytes())

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._stack.enter_context(self._unfinished.open("wb"))

    def _table_writer(self, file: IO[bytes], schema: Any) -> Any:
        from pyarrow import csv, parquet

        kind = csv.CSVWriter if self._path.suffix == ".csv" else parquet.ParquetWriter
        return kind(file, schema)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with refusing(self._path):
            try:
                self._stack.close()
                if kind is None:
                    os.replace(self._unfinished, self._path)
            finally:
                self._unfinished.unlink(missing_ok=True)
