"""Files of predictions, written some samples at a time: whole at the end, or not there. Needs no torch.

out.csv, out.parquet    a row for each sample: its number, its class, and the probability of each class
out.npy                 the probabilities alone, or the amounts, of shape (samples, ...)
"""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tutti.errors import BadData, BadOption
from tutti.records.files import refusing, unfinished_file
from tutti.records.output_kinds import Kind

Array = NDArray[Any]

_WIDEST: Final = 2000
"""The most columns of a table."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a model's values.

    Attributes:
        kind: of the outputs.
        classes: how many there are; None: none.
        labels: their names, or empty.
    """

    kind: Kind
    classes: int | None
    labels: tuple[str, ...]

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


class PredictionFile(AbstractContextManager["PredictionFile"], ABC):
    """A file of predictions that is being written.

    Args:
        path: of the file.
        samples: how many there will be.
        meaning: of the values.
    """

    def __init__(self, path: Path, samples: int, meaning: Meaning) -> None:
        self.path, self.samples, self.meaning = path, samples, meaning
        self.stack, self.begun = ExitStack(), False

    @abstractmethod
    def append(self, rows: Array, values: Array, dtype: type) -> None:
        """Add some samples.

        Args:
            rows: their numbers, of shape (samples,).
            values: float64, of shape (samples, ...).
            dtype: np.float32 or np.float64: the precision that the values have.

        Raises:
            BadData: they do not fit into such a file.
        """

    def open(self, mode: str) -> Any:
        """Open the file under its name while it is not whole."""
        path = unfinished_file(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "")
        return self.stack.enter_context(path.open(mode, encoding=encoding, newline=newline))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished = unfinished_file(self.path)
        with refusing(self.path):
            try:
                self.stack.close()
                if kind is None:
                    os.replace(unfinished, self.path)
            finally:
                unfinished.unlink(missing_ok=True)


class CsvFile(PredictionFile):
    """A text file with a line for each sample."""

    @override
    def append(self, rows: Array, values: Array, dtype: type) -> None:
        columns = self.meaning.columns(rows, values)
        if not self.begun:
            self._writer = csv.writer(self.open("w"), lineterminator="\n")
            self._writer.writerow(columns)
            self.begun = True
        digits = "%.17g" if dtype is np.float64 else "%.9g"
        texts = [
            [digits % number for number in column.tolist()] if column.dtype.kind == "f" else column.tolist()
            for column in columns.values()
        ]
        self._writer.writerows(zip(*texts, strict=True))


class ParquetFile(PredictionFile):
    """A Parquet file with a row for each sample."""

    @override
    def append(self, rows: Array, values: Array, dtype: type) -> None:
        import pyarrow
        from pyarrow import parquet

        columns = self.meaning.columns(rows, values).items()
        table = pyarrow.table({k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in columns})
        if not self.begun:
            self._writer = self.stack.enter_context(parquet.ParquetWriter(self.open("wb"), table.schema))
            self.begun = True
        self._writer.write_table(table)


class NpyFile(PredictionFile):
    """A NumPy file with the values alone."""

    @override
    def append(self, rows: Array, values: Array, dtype: type) -> None:
        values = np.ascontiguousarray(values, dtype)
        if not self.begun:
            self._file = self.open("wb")
            shape = (self.samples, *values.shape[1:])
            head = {"descr": values.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._file, head)
            self.begun = True
        self._file.write(values.tobytes())


SUFFIXES: Final[Mapping[str, type[PredictionFile]]] = MappingProxyType(
    {".csv": CsvFile, ".parquet": ParquetFile, ".npy": NpyFile}
)
"""The files of predictions by the ends of their names."""


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse a place for predictions, before any are made."""
    if path.suffix not in SUFFIXES:
        found = f"ends in '{path.suffix}'" if path.suffix else "has no ending"
        raise BadOption(f"the file {path} {found}; give one that ends in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise BadOption(f"{path} is a folder; name a file")
    if path.exists() and not overwrite:
        raise BadOption(f"{path} is there already; name another file, or give --overwrite")
