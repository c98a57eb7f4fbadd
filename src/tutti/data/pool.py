"""All samples of a data set in memory once, in their stored order, and data sets whose parts are rows of it.

    memory      │ train: inputs │ targets │ sums │ validation: inputs │ targets │ test: inputs │ targets │
    fold 0        rows 3 4 5 6 7 8                  trained on, nothing is copied
                  rows 0 1 2                        held out

`open_data` makes a pool of the parts of one run, which is faster for it; from one of a source many runs with
different parts are made.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.data.agreement import agreed
from tutti.data.arrays import samples_per_chunk, stored_dtype
from tutti.data.columns import Column, Columns, Stored, columns_of, in_place_of
from tutti.data.contents import Contents
from tutti.data.parts import PROBED, DataSet, Part, Scale, scale_of_columns, shape_of
from tutti.data.rows import Array, Rows
from tutti.data.scale import mean_scale, pixel_sums, scale_of
from tutti.data.sources import read_source
from tutti.data.splits import Indices, split
from tutti.data.streaming.options import without_stream
from tutti.errors import BadData
from tutti.free_memory import free_bytes
from tutti.records.shapes import Shape
from tutti.records.splits import read_split

BY_NUMBER: Final = "runs that need samples by number: with a split, predictions or weights, or one of many"

FEWER: Final = f"give fewer samples: {BY_NUMBER}, have all of them in memory"
"""The remedy for data that it does not hold."""

ALIGNMENT: Final = 64
"""Alignment of tensors in the memory, in bytes."""


@dataclass(frozen=True)
class ColumnOutline:
    """The size and kind of one input.

    Attributes:
        shape: of one row.
        dtype: of the rows as stored.
        values: the shape of the values of all sequences; None: it is no sequence.
        of_values: the type of the values.
        longest: the length of the longest sequence.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: tuple[int, ...] | None = None
    of_values: torch.dtype = torch.float32
    longest: int = 0

    @classmethod
    def of(cls, column: Column[Rows]) -> ColumnOutline:
        """Return the outline of an input as it was read."""
        rows, values = column.rows, column.values
        if values is None:
            return cls(rows.shape[1:], _kept(rows))
        return cls(rows.shape[1:], _kept(rows), values.shape, _kept(values), column.longest)

    @property
    def column(self) -> Column[Tensor]:
        """Such a column of no samples, without memory."""
        rows = torch.empty(0, *self.shape, device="meta")
        return Column(rows, None if self.values is None else rows.new_empty(self.values), self.longest)


def _kept(rows: Rows) -> torch.dtype:
    """The type of rows as stored."""
    return torch.from_numpy(rows[:0].astype(stored_dtype(rows))).dtype


@dataclass(frozen=True)
class PoolOutline:
    """The size and kind of a pool, which is enough to find the samples in its memory.

    Attributes:
        name: of the data set.
        lengths: the samples of "train", and perhaps of "validation" and "test".
        inputs: what each column of them is like.
        form: how the columns are put together, with nothing in them.
        target_shape: of one target.
        targets: the type of the targets.
        classes: the number of classes; None when the targets are floats.
        labels: the classes' names; empty when unknown.
        fingerprint: tells the training samples from those of other data; the same for any type of floats.
        filled: means of the training samples stand for inputs that are NaN.
        columns: the names of the inputs, where each is a column of a table.
    """

    name: str
    lengths: tuple[tuple[str, int], ...]
    inputs: tuple[ColumnOutline, ...]
    form: Stored[None]
    target_shape: tuple[int, ...]
    targets: torch.dtype
    classes: int | None
    labels: tuple[str, ...]
    fingerprint: str
    filled: bool = False
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, contents: Contents[Stored[Rows], Array]) -> PoolOutline:
        """Return the outline of a data set as it was read."""
        inputs, targets = contents.parts["train"]
        return cls(
            contents.name,
            tuple((part, len(y)) for part, (_, y) in contents.parts.items()),
            tuple(map(ColumnOutline.of, columns_of(inputs))),
            in_place_of(inputs, [Column(None) for _ in columns_of(inputs)]),
            targets.shape[1:],
            torch.from_numpy(targets[:0]).dtype,
            contents.classes,
            contents.labels,
            _fingerprint(inputs, targets),
            contents.filled,
            contents.columns,
        )

    @property
    def nbytes(self) -> int:
        """The memory that the pool takes, in bytes."""
        return sum(_room(shape, dtype) for shape, dtype in self._tensors())

    @property
    def shape(self) -> Shape:
        """The shape of one input; see `Part.shape`."""
        return shape_of(in_place_of(self.form, [one.column for one in self.inputs]))

    def laid(self, memory: Tensor) -> SamplePool:
        """Return the pool in some memory.

        Args:
            memory: at least `nbytes` bytes, as uint8, whose first address is a multiple of `ALIGNMENT`.
        """
        found, start = [], 0
        for shape, dtype in self._tensors():
            count = math.prod(shape) * dtype.itemsize
            found.append(memory[start : start + count].view(dtype).view(shape))
            start += _room(shape, dtype)
        tensors = iter(found)
        sums = tuple(next(tensors) for _ in self.inputs)
        values = [None if one.values is None else next(tensors) for one in self.inputs]
        parts = {}
        for part, _ in self.lengths:
            columns = [
                Column(next(tensors), own, one.longest) for one, own in zip(self.inputs, values, strict=True)
            ]
            parts[part] = in_place_of(self.form, columns), next(tensors)
        return SamplePool(self, parts, sums)

    def _tensors(self) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type of sums, of values of sequences, and of the inputs and targets of each part."""
        lengths = dict(self.lengths)
        for one in self.inputs:
            channels = one.shape[0] if len(one.shape) == 3 else 1
            yield (lengths["train"] if one.dtype == torch.uint8 else 0, channels, 2), torch.int64
        for one in self.inputs:
            if one.values is not None:
                yield one.values, one.of_values
        for length in lengths.values():
            for one in self.inputs:
                yield (length, *one.shape), one.dtype
            yield (length, *self.target_shape), self.targets


@dataclass(frozen=True)
class SamplePool:
    """The samples of a data set in memory: do not write to it, once it is filled.

    Attributes:
        outline: what there is.
        parts: the inputs and targets of "train", and perhaps of "validation" and "test".
        sums: for each column, of the values of each training sample, and of their squares, per channel: the
            pixel scale of any rows comes from these. No samples, where inputs are not 8-bit.
    """

    outline: PoolOutline
    parts: Mapping[str, tuple[Stored[Tensor], Tensor]]
    sums: tuple[Tensor, ...]

    def fill(self, contents: Contents[Stored[Rows], Array]) -> None:
        """Write a data set into the memory; one process does."""
        for part, (inputs, targets) in contents.parts.items():
            memory, y = self.parts[part]
            for read, column in zip(columns_of(inputs), columns_of(memory), strict=True):
                _write(column.rows, read.rows)
                if part == "train" and column.values is not None and read.values is not None:
                    _write(column.values, read.values)
            y.numpy()[:] = targets
        for sums, column in zip(self.sums, columns_of(self.parts["train"][0]), strict=True):
            if len(sums):
                sums.numpy()[:] = pixel_sums(column.rows.numpy())

    @property
    def dataset(self) -> DataSet:
        """The data set with the parts that there are."""
        return self.with_rows(None, np.arange(0), alone=False)

    def with_rows(self, train: Indices | None, held_out: Indices, alone: bool) -> DataSet:
        """Return the data set whose training and validation parts are rows of the training samples.

        Args:
            train: the rows to train on; None: all.
            held_out: those of the validation part; if there are none, it is that of the source, if any.
            alone: there is no other part: neither the source's own validation part nor its test part.
        """
        rows, outline = None if train is None else torch.from_numpy(train), self.outline
        inputs, targets = self.parts["train"]
        scales = [self._scale_of(number, column, train) for number, column in enumerate(columns_of(inputs))]
        scale = scale_of_columns(inputs, scales)
        others = {name: Part(*tensors, scale) for name, tensors in self.parts.items() if not alone}
        validation = others.get("validation")
        if len(held_out):
            validation = Part(inputs, targets, scale, torch.from_numpy(held_out))
        first = Part(inputs, targets, scale, rows)
        test = others.get("test")
        classes, labels = outline.classes, outline.labels
        return DataSet(
            outline.name, first, validation, test, classes, labels, outline.filled, outline.columns
        )

    def _scale_of(self, number: int, column: Column[Tensor], train: Indices | None) -> Scale:
        """Return the scale of a column from some training samples; None: from all."""
        sums = self.sums[number]
        if len(sums):
            pixels = math.prod(column.rows.shape[1:]) // sums.shape[1]
            some = sums if train is None else sums.index_select(0, torch.from_numpy(train))
            return scale_of(some.sum(0).numpy(), len(some) * pixels)
        if self.outline.filled and column.values is None and column.rows.is_floating_point():
            return mean_scale(column.rows.numpy(), train)
        return Scale()


def _write(memory: Tensor, rows: Rows) -> None:
    x, step = memory.numpy(), samples_per_chunk(rows)
    for start in range(0, len(rows), step):
        x[start : start + step] = rows[start : start + step]


def open_pool(data: object, comm: Communicator, options: Mapping[str, object] | None = None) -> SamplePool:
    """Read a data set into a pool (collective): once per host, into memory that the host's ranks share.

    Args:
        data: as for `tutti.data.open_data`; only the first rank of each host looks at it.
        comm: all ranks.
        options: likewise.

    Raises:
        UserError: as `open_data` does; on every rank the same.
    """
    return read_once(comm, lambda: read_source(data, without_stream(data, options or {}, BY_NUMBER)), FEWER)


def read_once(
    comm: Communicator, source: Callable[[], Contents[Stored[Rows], Array]], remedy: str
) -> SamplePool:
    """Read contents into memory that the ranks of a host share (collective).

    Args:
        comm: all ranks.
        source: called by the first rank of each host.
        remedy: what to do about contents that the free memory does not hold.
    """
    node = comm.node
    read: list[Contents[Stored[Rows], Array]] = []

    def look() -> PoolOutline:
        contents = source()
        outline = PoolOutline.of(contents)
        refuse_too_large(outline.name, outline.nbytes, remedy)
        read.append(contents)
        return outline

    outline = agreed(comm, look)
    pool = outline.laid(node.shared(outline.nbytes, dtype=torch.uint8))
    for contents in read:
        pool.fill(contents)
    # Nobody goes on before the leader has filled it.
    node.barrier()
    return pool


def refuse_too_large(name: str, nbytes: int, remedy: str) -> None:
    """Refuse data that the free memory does not hold, before they are read.

    Args:
        name: of the data.
        nbytes: that they take.
        remedy: what to do about it.

    Raises:
        BadData: the message ends with the remedy.
    """
    free = free_bytes()
    if free is not None and nbytes > free:
        raise BadData(
            f"{name} takes {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free; {remedy}"
        )


def divided(
    pool: SamplePool, comm: Communicator, validation: float, seed: int, place: tuple[str, int] | None = None
) -> DataSet:
    """Return a data set whose training and validation parts are rows of a pool (collective).

    Args:
        pool: seen by every rank.
        comm: all ranks.
        validation: the share of the training samples that is kept aside, as for `tutti.data.open_data`.
        seed: decides which.
        place: a file of splits and the number of one; its held-out samples are the validation part then, in
            place of any other, and there is no test part: that is left for when all is decided.

    Raises:
        BadData: a part would be empty, or the split cannot be used; on every rank the same.
    """
    rows = agreed(
        comm,
        lambda: _rows(pool, validation, seed, place),
        "splits",
        lambda both: zlib.crc32(both[1].data, zlib.crc32(both[0].data)),
    )
    return pool.with_rows(*rows, alone=place is not None)


def _rows(
    pool: SamplePool, validation: float, seed: int, place: tuple[str, int] | None
) -> tuple[Indices, Indices]:
    outline, (_, targets) = pool.outline, pool.parts["train"]
    if place is not None:
        file, number = place
        found = read_split(Path(file).expanduser(), number, len(targets), outline.fingerprint)
        return found.train, found.test
    share = 0 if "validation" in pool.parts else validation
    return split(targets.numpy(), share, seed, outline.classes)


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a tensor and of the gap after it."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _fingerprint(inputs: Stored[Rows], targets: Array) -> str:
    """Return what tells samples from others: their shapes, all targets and some inputs."""
    some = np.linspace(0, len(targets) - 1, min(len(targets), PROBED)).astype(np.int64)
    columns = columns_of(inputs)
    shapes = [shape for column in columns for shape in _shapes(column)]
    found = hashlib.sha256(repr((*shapes, targets.shape)).encode())
    if isinstance(inputs, Columns):
        found.update(repr(inputs.names).encode())
    for array in (targets, *(array for column in columns for array in _some_of(column, some))):
        kept = np.dtype(np.float32) if array.dtype.kind == "f" else stored_dtype(array)
        found.update(np.ascontiguousarray(array, kept).tobytes())
    return found.hexdigest()


def _shapes(column: Column[Rows]) -> list[tuple[int, ...]]:
    return [rows.shape for rows in (column.rows, column.values) if rows is not None]


def _some_of(column: Column[Rows], some: Indices) -> Iterator[Array]:
    rows = column.rows[some]
    yield rows
    if column.values is not None:
        for start, length in rows:
            yield column.values[start : start + length]
