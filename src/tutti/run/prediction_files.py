"""Files of predictions, written some samples at a time: whole at the end, or not there. Needs no torch.

out.csv, out.parquet    a row for each sample: its number, its class, and the probability of each class
out.npy                 the probabilities alone, or the amounts, of shape (samples, ...)
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tutti.errors import BadData, BadOption
from tutti.records.files import refusing, unfinished_file
from tutti.records.output_kinds import Kind

Array = NDArray[Any]

SUFFIXES: Final = (".csv", ".parquet", ".npy")
"""The ends of the names of files of predictions."""

_WIDEST: Final = 2000
"""The most columns of a table."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a model's values."""

    kind: Kind
    classes: int | None
    labels: tuple[str, ...]  # names of the classes, or empty

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
        if self.kind is Kind.AMOUNTS:
            heads = ["value"] if count == 1 else [f"value {at}" for at in range(count)]
        elif count == 1 and self.classes is not None:
            heads = [f"p({self.labels[1] if len(self.labels) > 1 else 1})"]
        else:
            heads = [f"p({one})" for one in (self.labels if len(self.labels) == count else range(count))]
        return columns | dict(zip(heads, values.reshape(len(values), -1).T, strict=True))


class PredictionFile(AbstractContextManager["PredictionFile"]):
    """A file of predictions that is being written; `samples` is how many there will be."""

    def __init__(self, path: Path, samples: int, meaning: Meaning) -> None:
        self._path, self._samples, self._meaning = path, samples, meaning
        self._unfinished = unfinished_file(path)
        self._stack = ExitStack()
        self._writer: Any = None

    def append(self, rows: Array, values: Array, dtype: type) -> None:
        """Add some samples, by their numbers.

        Args:
            rows: numbers of shape (samples,).
            values: float64, of shape (samples, ...).
            dtype: np.float32 or np.float64: the precision that the values have.
        """
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


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse a place for predictions, before any are made."""
    if path.suffix not in SUFFIXES:
        found = f"ends in '{path.suffix}'" if path.suffix else "has no ending"
        raise BadOption(f"the file {path} {found}; give one that ends in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise BadOption(f"{path} is a folder; name a file")
    if path.exists() and not overwrite:
        raise BadOption(f"{path} is there already; name another file, or give --overwrite")
