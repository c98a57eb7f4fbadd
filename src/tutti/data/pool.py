"""All samples of a data set in memory once, in their stored order, and data sets whose parts are rows of it.

    memory      │ train: inputs │ targets │ sums │ validation: inputs │ targets │ test: inputs │ targets │
    fold 0        rows 3 4 5 6 7 8                  trained on, nothing is copied
                  rows 0 1 2                        held out

`open_data` lays a data set out by its parts instead, which is faster for one run; from a pool many runs with
different parts are made.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.data.arrays import samples_per_chunk, stored_dtype
from tutti.data.contents import Contents
from tutti.data.parts import PROBED, DataSet, Part, Scale
from tutti.data.rows import Array, Rows
from tutti.data.scale import mean_scale, pixel_sums, scale_of
from tutti.data.sources import read_source
from tutti.data.splits import Indices, split
from tutti.errors import BadData, UserError
from tutti.records.splits import read_split

ALIGNMENT: Final = 64
"""Where tensors begin in the memory, in bytes."""


@dataclass(frozen=True)
class PoolOutline:
    """The size and kind of a pool, which is enough to find the samples in its memory.

    Attributes:
        name: of the data set.
        lengths: the samples of "train", and perhaps of "validation" and "test".
        shape: of one input.
        target_shape: of one target.
        inputs: the type of the inputs as stored.
        targets: that of the targets.
        classes: the number of classes; None when the targets are floats.
        labels: the classes' names; empty when unknown.
        fingerprint: tells the training samples from those of other data; the same for any type of floats.
        filled: means of the training samples stand for inputs that are NaN.
        columns: the names of the inputs, where each is a column of a table.
    """

    name: str
    lengths: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    inputs: torch.dtype
    targets: torch.dtype
    classes: int | None
    labels: tuple[str, ...]
    fingerprint: str
    filled: bool = False
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, contents: Contents[Rows, Array]) -> PoolOutline:
        """Return the outline of a data set as it was read."""
        inputs, targets = contents.parts["train"]
        kept = torch.from_numpy(inputs[:0].astype(stored_dtype(inputs)))
        return cls(
            contents.name,
            tuple((part, len(x)) for part, (x, _) in contents.parts.items()),
            inputs.shape[1:],
            targets.shape[1:],
            kept.dtype,
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
        sums, *tensors = found
        parts = {
            part: (tensors[2 * number], tensors[2 * number + 1])
            for number, (part, _) in enumerate(self.lengths)
        }
        return SamplePool(self, parts, sums)

    def _tensors(self) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type of the sums, then of inputs and targets of each part."""
        lengths = dict(self.lengths)
        channels = self.shape[0] if len(self.shape) == 3 else 1
        scaled = self.inputs == torch.uint8
        yield (lengths["train"] if scaled else 0, channels, 2), torch.int64
        for length in lengths.values():
            yield (length, *self.shape), self.inputs
            yield (length, *self.target_shape), self.targets


@dataclass(frozen=True)
class SamplePool:
    """The samples of a data set in memory: do not write to it, once it is filled.

    Attributes:
        outline: what there is.
        parts: the inputs and targets of "train", and perhaps of "validation" and "test".
        sums: of the values of each training sample, and of their squares, per channel: the pixel scale of any
            rows comes from these. No samples, where inputs are not 8-bit.
    """

    outline: PoolOutline
    parts: Mapping[str, tuple[Tensor, Tensor]]
    sums: Tensor

    def fill(self, contents: Contents[Rows, Array]) -> None:
        """Write a data set into the memory; one process does."""
        for part, (inputs, targets) in contents.parts.items():
            x, y = (tensor.numpy() for tensor in self.parts[part])
            step = samples_per_chunk(inputs)
            for start in range(0, len(inputs), step):
                x[start : start + step] = inputs[start : start + step]
            y[:] = targets
        if len(self.sums):
            self.sums.numpy()[:] = pixel_sums(self.parts["train"][0].numpy())

    def with_rows(self, train: Indices, held_out: Indices, alone: bool) -> DataSet:
        """Return the data set whose training and validation parts are rows of the training samples.

        Args:
            train: the rows to train on.
            held_out: those of the validation part; if there are none, it is that of the source, if any.
            alone: there is no other part: neither the source's own validation part nor its test part.
        """
        rows, outline = torch.from_numpy(train), self.outline
        scale = Scale()
        if len(self.sums):
            pixels = math.prod(outline.shape) // self.sums.shape[1]
            scale = scale_of(self.sums.index_select(0, rows).sum(0).numpy(), len(rows) * pixels)
        inputs, targets = self.parts["train"]
        if outline.filled:
            scale = mean_scale(inputs.numpy(), train)
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


def open_pool(data: object, comm: Communicator, options: Mapping[str, object] | None = None) -> SamplePool:
    """Read a data set into a pool (collective): once per host, into memory that the host's ranks share.

    Args:
        data: as for `tutti.data.open_data`; only the first rank of each host looks at it.
        comm: all ranks.
        options: likewise.

    Raises:
        UserError: as `open_data` does; on every rank the same.
    """
    node = comm.node
    contents: Contents[Rows, Array] | None = None
    found: PoolOutline | UserError | None = None
    if node.rank == 0:
        try:
            contents = read_source(data, options or {})
            found = PoolOutline.of(contents)
        except UserError as error:
            found = error  # the host's other ranks wait for the leader's word
    outline = cast("PoolOutline | UserError", node.broadcast_object(found))
    outlines = cast("list[PoolOutline | UserError]", comm.all_gather_objects(outline))
    _refuse_differing(outlines, "data")
    assert isinstance(outline, PoolOutline), "an error has been raised"
    pool = outline.laid(node.shared(outline.nbytes, dtype=torch.uint8))
    if contents is not None:
        pool.fill(contents)
    # Nobody goes on before the leader has filled it.
    node.barrier()
    return pool


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
    node = comm.node
    found: tuple[Indices, Indices] | UserError | None = None
    if node.rank == 0:
        try:
            found = _rows(pool, validation, seed, place)
        except UserError as error:
            found = error  # the host's other ranks wait for the leader's word
    rows = cast("tuple[Indices, Indices] | UserError", node.broadcast_object(found))
    said = (
        rows if isinstance(rows, UserError) else zlib.crc32(rows[1].tobytes(), zlib.crc32(rows[0].tobytes()))
    )
    _refuse_differing(comm.all_gather_objects(said), "splits")
    assert isinstance(rows, tuple), "an error has been raised"
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


def _refuse_differing(found: list[object] | list[PoolOutline | UserError], what: str) -> None:
    """Raise the first error among what the ranks have found, or one if they have found different things."""
    for rank, one in enumerate(found):
        if isinstance(one, UserError):
            raise one
        if one != found[0]:
            raise BadData(
                f"the hosts read different {what}: rank {rank} has others than rank 0; copy the same files "
                "to every host"
            )


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a tensor and of the gap after it."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _fingerprint(inputs: Rows, targets: Array) -> str:
    """Return what tells samples from others: their shapes, all targets and some inputs."""
    some = np.linspace(0, len(inputs) - 1, min(len(inputs), PROBED)).astype(np.int64)
    found = hashlib.sha256(repr((inputs.shape, targets.shape)).encode())
    for array in (targets, inputs[some]):
        kept = np.dtype(np.float32) if array.dtype.kind == "f" else stored_dtype(array)
        found.update(np.ascontiguousarray(array, kept).tobytes())
    return found.hexdigest()
