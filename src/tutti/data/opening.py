"""Opening a data set: one rank of each host reads it, into memory that all ranks of the host share.

    memory      │ train: inputs │ targets │ validation: inputs │ targets │ test: inputs │ targets │
    run           rows 0 1 3 4 5 6 8                trained on, nothing is copied
                  rows 2 7                          kept aside for validation, others for a test

The samples lie in their stored order. A run, a fold and a prediction are rows of them.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.data.arrays import chunks_of, stored_dtype
from tutti.data.columns import Column, Columns, Stored, columns_of, in_place_of
from tutti.data.contents import ReadData
from tutti.data.fitting import fit
from tutti.data.formats.npy import Mapped
from tutti.data.parts import DataSet, Part, Scale, once, scale_of_columns
from tutti.data.preparation import prepared
from tutti.data.rows import Array, Rows
from tutti.data.scale import mean_scale, pixel_scale, units_of
from tutti.data.sources import read_inputs, read_source
from tutti.data.splits import Indices, divide
from tutti.data.streaming import Source, StreamedPart
from tutti.data.targets import CLASSES, KnownClasses
from tutti.errors import BadData, BadOption, UserError
from tutti.free_memory import free_bytes
from tutti.records.preparation import Preparation, Table
from tutti.records.splits import read_split

T = TypeVar("T")

ALIGNMENT: Final = 64
"""Alignment of tensors in the memory, in bytes."""

PROBED: Final = 100
"""Samples whose inputs are looked at to tell data sets apart."""


@dataclass(frozen=True)
class SamplePool:
    """The samples of a data set. An outline of a pool has tensors without memory.

    Attributes:
        dataset: with the parts of the source, not scaled.
        groups: the number of each training sample's group, int64; None: there are none.
    """

    dataset: DataSet
    groups: Tensor | None = None

    @classmethod
    def outline(cls, contents: ReadData) -> SamplePool:
        """Return the outline of a data set after reading."""
        meta = once(_meta)
        parts: dict[str, Part] = {}
        for name, (inputs, y) in contents.parts.items():
            x = in_place_of(inputs, [column.changed(meta) for column in columns_of(inputs)])
            if contents.buffer_bytes:
                (files,) = columns_of(inputs)
                source = Source(cast("Mapped", files.rows), meta(files.rows).dtype)
                parts[name] = StreamedPart(
                    x, _meta(y, y.dtype), buffer_bytes=contents.buffer_bytes, source=source
                )
            else:
                parts[name] = Part(x, _meta(y, y.dtype))
            left_out, mark = contents.left_out.get(name), _fingerprint(inputs, y)
            parts[name] = replace(parts[name], left_out=left_out, fingerprint=mark)
            if name in contents.weights:
                weights = torch.empty(len(y), dtype=torch.float64, device="meta")
                parts[name] = replace(parts[name], stored_weights=weights)
        dataset = DataSet(
            contents.name,
            parts["train"],
            parts.get("validation"),
            parts.get("test"),
            contents.classes,
            contents.labels,
            contents.filled,
            contents.columns,
            contents.table,
        )
        return cls(dataset, None if contents.groups is None else _meta(contents.groups, np.dtype(np.int64)))

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the tensors, each once."""
        every = [tensor for part in self.dataset.parts for tensor in part.tensors()]
        every += [] if self.groups is None else [self.groups]
        yield from {id(tensor): tensor for tensor in every}.values()

    @property
    def nbytes(self) -> int:
        """The memory that the pool takes, in bytes."""
        return sum(map(_room, self._tensors()))

    def refuse_too_large(self) -> None:
        """Refuse data that do not fit into the free memory, before they are read."""
        free, needed = free_bytes(), self.nbytes
        if free is not None and needed > free:
            raise BadData(
                f"{self.dataset.name} takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are "
                "free; write it as NPY files by: tutti data convert DATA NEW, and give --data NEW: such a "
                "folder is streamed"
            )

    def laid(self, memory: Tensor) -> SamplePool:
        """Return the pool of an outline in aligned memory of `nbytes` bytes, as uint8."""
        places, start = {}, 0
        for one in self._tensors():
            places[id(one)] = memory[start : start + one.nbytes].view(one.dtype).view(one.shape)
            start += _room(one)
        dataset = self.dataset.with_parts(lambda part: part.changed(lambda one: places[id(one)]))
        return replace(self, dataset=dataset, groups=None if self.groups is None else places[id(self.groups)])

    def fill(self, contents: ReadData) -> None:
        """Write a data set into the memory; called by one process."""
        for name, (inputs, targets) in contents.parts.items():
            part = cast("Part", getattr(self.dataset, name))
            part.stored_targets.numpy()[:] = targets
            if part.stored_weights is not None:
                part.stored_weights.numpy()[:] = cast("Array", contents.weights[name])
            if isinstance(part, StreamedPart):
                continue
            for read, column in zip(columns_of(inputs), columns_of(part.stored_inputs), strict=True):
                _write(column.rows, read.rows)
                if column.values is not None and read.values is not None:
                    _write(column.values, read.values)
        if self.groups is not None:
            self.groups.numpy()[:] = np.unique(cast("Array", contents.groups), return_inverse=True)[1]

    def divided(
        self,
        comm: Communicator,
        validation: float,
        seed: int,
        place: tuple[str, int] | None = None,
        embeds: bool = False,
        before: Preparation | None = None,
        test: float = 0.0,
    ) -> DataSet:
        """Divide the training samples into those to train on and those held out (collective).

        Args:
            comm: all ranks.
            validation: the share of the training samples to hold out, as for `open_data`.
            seed: decides which.
            place: a file of splits and the number of one; its held-out samples then replace the validation
                part, and there is no test part, which is for the final decision.
            embeds: the model takes category numbers for columns of many texts.
            before: the preparation of a table in training, to use instead of another.
            test: the share to hold out as the test part, before the validation part.
        """

        def look() -> tuple[Indices, Indices, Indices, Scale | Preparation]:
            part, table, filled = self.dataset.train, self.dataset.table, self.dataset.filled
            if place is not None:
                file, number = place
                found = read_split(Path(file).expanduser(), number, len(part), self.dataset.fingerprint)
                train, aside, tested = found.train, found.test, np.arange(0)
            else:
                groups = None if self.groups is None else self.groups.numpy()
                targets = part.stored_targets.numpy()
                train, aside, tested = self.rows(targets, groups, test, validation, seed)
            if table is None:
                scales = [_scale_of(part, one, train, filled) for one in columns_of(part.stored_inputs)]
                return train, aside, tested, scale_of_columns(part.stored_inputs, scales)
            if before is not None:
                return train, aside, tested, before
            units = units_of(part.stored_targets.numpy()[train])
            return train, aside, tested, replace(_fit(part, table, train, filled, embeds), units=units)

        train, aside, tested, fitted = agreed(
            comm, look, "splits", lambda found: [zlib.crc32(rows.data) for rows in found[:3]]
        )
        whole = self.dataset
        scale = fitted if isinstance(fitted, Scale) else prepared(fitted, cast("Table", whole.table))
        rows = None if len(train) == len(whole.train) and place is None else torch.from_numpy(train)
        validation_part, test_part = whole.validation, whole.test
        if len(aside):
            validation_part = whole.train.with_rows(torch.from_numpy(aside), scale)
        elif validation_part is not None:
            validation_part = validation_part.with_rows(None, scale)
        if len(tested):
            test_part = whole.train.with_rows(torch.from_numpy(tested), scale)
        elif test_part is not None:
            test_part = None if place else test_part.with_rows(None, scale)
        first = whole.train.with_rows(rows, scale)
        return replace(whole, train=first, validation=validation_part, test=test_part)

    def rows(
        self, targets: Array, groups: Array | None, test: float, validation: float, seed: int
    ) -> tuple[Indices, Indices, Indices]:
        """Return the rows of the training, the validation and the test part, also for an outline."""
        whole = self.dataset
        if test and whole.test is not None:
            raise BadOption(f"--test is {test}, but {whole.name} has a test part; leave --test out")
        share = 0 if whole.validation is not None else validation
        if isinstance(whole.train, StreamedPart):
            return whole.train.divide(test, share, seed)
        return divide(targets, test, share, seed, whole.classes, groups)


def open_data(
    data: object,
    comm: Communicator,
    validation: float = 0.1,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    known: KnownClasses | str = CLASSES,
) -> DataSet:
    """Open a data set (collective): it is read once per host, into memory that the host's ranks share.

    8-bit inputs stay 8-bit; batches of them become float32 of mean 0 and deviation 1 per channel over the
    training samples. Floats are kept in torch's default type (float32; within
    `keeping_doubles` float64), not scaled; other integers as int64.

    Args:
        data: see `tutti.data.sources`. Only the first rank of each host reads it.
        comm: all ranks.
        validation: share of the training samples to hold out, 0 to below 1, the same from each class. A
            source with its own validation part keeps it.
        seed: decides which samples are held out.
        options: arguments of the factory; `classes`, the number of classes, goes with all kinds of data.
            `stream` (True, False or "auto") and `buffer` (MB) are for folders of NPY files: their inputs are
            read window by window, if they do not fit into memory.
        known: the classes of a model that the data are for; or the meaning of whole numbers: see `meant_by`.

    Returns:
        The data set; its arrays are views of shared memory.

    Raises:
        BadData: the data are missing, broken, or do not fit together. Every rank raises the same error.
        NotFinite: NaN or inf in the data.
        BadOption: an option that cannot be used.
        UnknownName: no such built-in data set, file, factory or option.
    """
    return open_pool(data, comm, options, known).divided(comm, validation, seed)


def open_pool(
    data: object,
    comm: Communicator,
    options: Mapping[str, object] | None = None,
    known: KnownClasses | str = CLASSES,
) -> SamplePool:
    """Read a data set into a pool (collective); see `open_data`.

    Only the first rank of each host reads it; every rank raises the same error.
    """
    return _pooled(comm, lambda: read_source(data, options or {}, known))


def open_inputs(
    data: object, comm: Communicator, options: Mapping[str, object], part: str | None = None
) -> DataSet:
    """Open the inputs of a part as a training part with targets of 0 (collective).

    The part is "train", "validation" or "test"; None: the test part, or the only one.
    """
    return _pooled(comm, lambda: read_inputs(data, options, part)).dataset


def _pooled(comm: Communicator, read: Callable[[], ReadData]) -> SamplePool:
    found: list[ReadData] = []

    def look() -> SamplePool:
        contents = read()
        outline = SamplePool.outline(contents)
        outline.refuse_too_large()
        found.append(contents)
        return outline

    with _all_cores(comm.node):
        outline = agreed(comm, look)
        pool = outline.laid(comm.node.shared(outline.nbytes, dtype=torch.uint8))
        for contents in found:
            pool.fill(contents)
    comm.node.barrier()  # The leader has filled it.
    return pool


@contextmanager
def _all_cores(node: Communicator) -> Iterator[None]:
    """Let a host's first rank work on the cores of all its ranks, which wait for it (collective)."""
    own = os.sched_getaffinity(0)
    every = cast("list[set[int]]", node.all_gather_objects(own))
    if node.rank == 0:
        os.sched_setaffinity(0, set().union(*every))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def agreed(
    comm: Communicator, look: Callable[[], T], what: str = "data", about: Callable[[T], object] = repr
) -> T:
    """Return the finding of this host's first rank (collective).

    `about` it must be the same on all hosts. An error of one rank is raised on every rank.
    """
    found: T | UserError | None = None
    if comm.node.rank == 0:
        try:
            found = look()
        except UserError as error:
            found = error  # the host's other ranks wait for it
    known = cast("T | UserError", comm.node.broadcast_object(found))
    every = comm.all_gather_objects(known if isinstance(known, UserError) else about(known))
    for rank, one in enumerate(every):
        if isinstance(one, UserError):
            raise one
        if one != every[0]:
            raise BadData(
                f"the hosts read different {what}: rank {rank} has others than rank 0; copy the same files "
                "to every host"
            )
    return cast("T", known)


def _meta(rows: Rows, dtype: np.dtype[np.generic] | None = None) -> Tensor:
    """Return a tensor without memory with the stored shape and dtype of rows."""
    kept = torch.from_numpy(np.empty(0, dtype or stored_dtype(rows))).dtype
    return torch.empty(rows.shape, dtype=kept, device="meta")


def _scale_of(part: Part, column: Column[Tensor], train: Indices, filled: bool) -> Scale:
    """Return the scale of an input from some training samples."""
    if column.values is None and column.rows.dtype == torch.uint8:
        if isinstance(part, StreamedPart):
            return pixel_scale(part.source.files.__getitem__, part.thinned(train))
        return pixel_scale(column.rows.numpy().__getitem__, train)
    if filled and column.values is None and column.rows.is_floating_point():
        return mean_scale(column.rows.numpy(), train)
    return Scale()


def _fit(part: Part, table: Table, train: Indices, filled: bool, embeds: bool) -> Preparation:
    """Return the preparation of a table from some training samples."""
    if isinstance(part, StreamedPart):
        return fit(part.source.files.__getitem__, part.thinned(train), table, len(part), filled, embeds)
    stored = cast("Tensor", part.stored_inputs).numpy()
    return fit(stored.__getitem__, train, table, len(part), filled, embeds)


def _write(memory: Tensor, rows: Rows) -> None:
    array = memory.numpy()
    for start, chunk in chunks_of(rows):
        array[start : start + len(chunk)] = chunk


def _room(tensor: Tensor) -> int:
    """Return the bytes of a tensor and of the gap after it."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _fingerprint(inputs: Stored[Rows], targets: Array) -> str:
    """Return a hash that identifies samples: of their shapes, all targets and some inputs."""
    some = np.linspace(0, len(targets) - 1, min(len(targets), PROBED)).astype(np.int64)
    columns = columns_of(inputs)
    shapes = [rows.shape for column in columns for rows in (column.rows, column.values) if rows is not None]
    names = inputs.names if isinstance(inputs, Columns) else ()
    digest = hashlib.sha256(repr((shapes, names)).encode())
    for array in (targets, *(array for column in columns for array in _some_of(column, some))):
        kept = np.dtype(np.float32) if array.dtype.kind == "f" else stored_dtype(array)
        digest.update(np.ascontiguousarray(array, kept).tobytes())
    return digest.hexdigest()


def _some_of(column: Column[Rows], some: Indices) -> Iterator[Array]:
    rows = column.rows[some]
    yield rows
    if column.values is not None:
        for start, length in rows:
            yield column.values[start : start + length]
