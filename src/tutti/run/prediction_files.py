"""Files of predictions, written some samples at a time: whole at the end, or not there. Needs no torch.

out.csv, out.parquet    a row for each sample: its number, its class, and the probability of each class
out.npy                 the probabilities alone, or the amounts, of shape (samples, ...)
"""

from __future__ import annotations

import csv
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Final, TextIO, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tutti.errors import BadData, BadOption
from tutti.load_object import optional_package
from tutti.records.files import refusing, unfinished_file
from tutti.records.output_kinds import Kind

Array = NDArray[Any]

WIDEST: Final = 2000
"""The most columns of a table."""


class PredictionFile(AbstractContextManager["PredictionFile"], ABC):
    """A file of predictions that is being written.

    Args:
        path: of the file.
        samples: how many there will be.

    Raises:
        BadOption: another program is writing this file.
    """

    def __init__(self, path: Path, samples: int) -> None:
        self.path, self.samples, self._stack = path, samples, ExitStack()
        with refusing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(unfinished_file(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise BadOption(f"another program is writing {path}; name another file by -o") from None
            self.begin(unfinished_file(path))

    @abstractmethod
    def begin(self, path: Path) -> None:
        """Open the file."""

    @abstractmethod
    def append(self, rows: Array, values: Array, meaning: Meaning) -> None:
        """Add some samples.

        Args:
            rows: their numbers, of shape (samples,).
            values: probabilities or amounts, of shape (samples, ...).
            meaning: of the values.

        Raises:
            BadData: they do not fit into such a file.
        """

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with refusing(self.path):
            try:
                self._stack.close()
                if kind is None:
                    flush(unfinished_file(self.path))
                    os.replace(unfinished_file(self.path), self.path)
            finally:
                unfinished_file(self.path).unlink(missing_ok=True)
                os.close(self._lock)


class Meaning:
    """The meaning of a model's values, and the columns of a table of them.

    Args:
        kind: of the outputs.
        classes: how many there are; None: none.
        labels: their names, or empty.
        exact: the values are of 64 bits.
    """

    def __init__(self, kind: Kind, classes: int | None, labels: Sequence[str], exact: bool = False) -> None:
        self.kind, self.classes, self.labels, self.exact = kind, classes, tuple(labels), exact

    @property
    def one_class(self) -> bool:
        """True if each sample has one class."""
        return self.kind is Kind.CLASSES or self.classes is not None

    def class_of(self, values: Array) -> list[Any]:
        """Return the class of each sample, by name where it has one."""
        found = self.kind.classes(values, self.classes).tolist()
        return [self.labels[number] for number in found] if self.labels else found

    def heads(self, values: Array) -> list[str]:
        """Return the names of the columns of values, of shape (samples, numbers).

        Raises:
            BadData: they fit into no table.
        """
        if values.ndim > 2 and self.one_class:
            raise BadData(
                f"the model gives values of shape {values.shape[1:]} for each sample, a class for each "
                "position, which fits into no table; name a file that ends in .npy"
            )
        count = int(np.prod(values.shape[1:]))
        if count > WIDEST:
            raise BadData(
                f"the model gives {count:,} numbers for each sample, and a table has at most {WIDEST:,} "
                "columns; name a file that ends in .npy"
            )
        if self.kind is Kind.AMOUNTS:
            return ["value"] if count == 1 else [f"value {at}" for at in range(count)]
        if count == 1 and self.classes is not None:
            return [f"p({self.labels[1] if len(self.labels) > 1 else 1})"]
        names = self.labels if len(self.labels) == count else range(count)
        return [f"p({name})" for name in names]


class CsvFile(PredictionFile):
    """A text file with a line for each sample."""

    @override
    def begin(self, path: Path) -> None:
        self._file: TextIO = self._stack.enter_context(path.open("w", encoding="utf-8", newline=""))
        self._writer, self._empty = csv.writer(self._file, lineterminator="\n"), True

    @override
    def append(self, rows: Array, values: Array, meaning: Meaning) -> None:
        heads = meaning.heads(values)
        if self._empty:
            self._writer.writerow(["row", *(["class"] if meaning.one_class else []), *heads])
            self._empty = False
        digits = "%.17g" if meaning.exact else "%.9g"
        lines = [[digits % value for value in line] for line in values.reshape(len(values), -1).tolist()]
        if meaning.one_class:
            lines = [[one, *line] for one, line in zip(meaning.class_of(values), lines, strict=True)]
        self._writer.writerows([row, *line] for row, line in zip(rows.tolist(), lines, strict=True))


class ParquetFile(PredictionFile):
    """A Parquet file with a row for each sample."""

    @override
    def begin(self, path: Path) -> None:
        optional_package("pyarrow.parquet", "Parquet files")
        self._unfinished, self._writer = path, cast("Any", None)

    @override
    def append(self, rows: Array, values: Array, meaning: Meaning) -> None:
        arrow = optional_package("pyarrow", "Parquet files")
        columns: dict[str, Any] = {"row": rows}
        heads = meaning.heads(values)
        if meaning.one_class:
            columns["class"] = meaning.class_of(values)
        flat = values.reshape(len(values), -1).astype(np.float64 if meaning.exact else np.float32)
        columns |= dict(zip(heads, flat.T, strict=True))
        table = arrow.table(columns)
        if self._writer is None:
            parquet = optional_package("pyarrow.parquet", "Parquet files")
            self._writer = self._stack.enter_context(parquet.ParquetWriter(self._unfinished, table.schema))
        self._writer.write_table(table)


class NpyFile(PredictionFile):
    """A NumPy file with the values alone."""

    @override
    def begin(self, path: Path) -> None:
        self._file: BinaryIO = self._stack.enter_context(path.open("wb"))
        self._empty = True

    @override
    def append(self, rows: Array, values: Array, meaning: Meaning) -> None:
        found = np.ascontiguousarray(values, np.float64 if meaning.exact else np.float32)
        if self._empty:
            shape = (self.samples, *found.shape[1:])
            head = {"descr": found.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._file, head)
            self._empty = False
        self._file.write(found.tobytes())


SUFFIXES: Final[Mapping[str, type[PredictionFile]]] = MappingProxyType(
    {".csv": CsvFile, ".parquet": ParquetFile, ".npy": NpyFile}
)
"""The files of predictions by the ends of their names."""


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse a place for predictions, before any are made.

    Raises:
        BadOption: it is of an unknown kind, its package is not installed, or something is there.
    """
    if path.suffix not in SUFFIXES:
        found = f"ends in '{path.suffix}'" if path.suffix else "has no ending"
        raise BadOption(f"the file {path} {found}; give one that ends in {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        optional_package("pyarrow", "Parquet files")
    if path.is_dir():
        raise BadOption(f"{path} is a folder; name a file")
    if path.exists() and not overwrite:
        raise BadOption(f"{path} is there already; name another file, or give --overwrite")


def flush(path: Path) -> None:
    """Flush a file to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
