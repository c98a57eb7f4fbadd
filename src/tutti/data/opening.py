"""Opening a data set: one rank of each host reads it, into memory that all ranks of the host share."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.data.agreement import agreed
from tutti.data.arrays import samples_per_chunk, stored_dtype
from tutti.data.columns import Column, Stored, columns_of, in_place_of
from tutti.data.contents import Contents
from tutti.data.parts import DataSet, Part, Scale, scale_of_columns
from tutti.data.remote import local_copy
from tutti.data.rows import Array, Rows
from tutti.data.scale import mean_scale, pixel_scale
from tutti.data.sources import read_source
from tutti.data.splits import Indices, split
from tutti.data.streaming.opening import open_streamed
from tutti.data.streaming.options import Streamable, streamable, without_stream
from tutti.data.targets import KnownClasses
from tutti.errors import BadData, UserError
from tutti.free_memory import free_bytes

_Pieces = list[tuple[tuple[Stored[Rows], Array], Indices]]
"""Of train, validation and test: inputs and targets, and which of them go into the part, in which order."""


def open_data(
    data: object,
    comm: Communicator,
    validation: float = 0.1,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    known: KnownClasses | None = None,
) -> DataSet:
    """Open a data set (collective): it is read once per host, into memory that the host's ranks share.

    8-bit inputs stay 8-bit; batches of them become float32 of mean 0 and deviation 1 per channel over the
    training samples. Floats are kept in torch's default type (float32; within
    `keeping_doubles` float64), not scaled; other integers as int64.

    Args:
        data: a name in `BUILT_IN`; the path of an IDX or NPZ file or of a folder with IDX
            files; `package.module:factory` or `file.py:factory`; (x, y) or ((x, y), (x_test, y_test)) of
            arrays or tensors; a map-style torch data set or a pair of them (train, test); or a dict with keys
            like those of an NPZ file. Only the first rank of each host looks at it.
        comm: all ranks.
        validation: share of the training samples that is kept aside, 0 to below 1, the same from each class.
            A source with a validation part of its own keeps that one.
        seed: decides which samples are kept aside.
        options: arguments of the factory; `classes`, how many classes there are, goes with all kinds of data.
            `stream` (True, False or "auto") and `buffer` (MB) are for folders of NPY files: their inputs are
            read window by window, where memory does not hold them.
        known: the classes of a model that the data are for.

    Returns:
        The data set; its arrays are views of shared memory.

    Raises:
        BadData: the data are missing, broken, or do not fit together. Every rank raises the same error.
        NotFinite: NaN or inf in the data.
        BadOption: an option that cannot be used.
        UnknownName: no such built-in data set, file, factory or option.
    """
    streamed = _streamed(data, options or {}, comm)
    if streamed.wanted:
        return open_streamed(streamed.given, comm, validation, seed, known)
    data, options = streamed.data, streamed.options
    node = comm.node
    pieces: _Pieces = []

    def look() -> tuple[DataSet, int]:
        outline, checksum, read = _find(read_source(data, options, known), validation, seed)
        refuse_too_large(outline.name, outline.nbytes)
        pieces.extend(read)
        return outline, checksum

    outline, _ = agreed(comm, look)
    lengths, train = [len(part) for part in outline.parts], outline.train
    targets = node.shared(sum(lengths), *train.targets.shape[1:], dtype=train.targets.dtype)
    columns = [
        Column(
            node.shared(sum(lengths), *column.rows.shape[1:], dtype=column.rows.dtype),
            None if column.values is None else node.shared(*column.values.shape, dtype=column.values.dtype),
            column.longest,
        )
        for column in columns_of(train.stored_inputs)
    ]
    scale = None
    if node.rank == 0:
        _fill(targets, [(wanted, indices) for (_, wanted), indices in pieces])
        for number, column in enumerate(columns):
            read = [columns_of(stored)[number] for (stored, _), _ in pieces]
            of_pieces = [(one.rows, indices) for one, (_, indices) in zip(read, pieces, strict=True)]
            _fill(column.rows, of_pieces)
            if column.values is not None and read[0].values is not None:
                _fill(column.values, [(read[0].values, np.arange(len(read[0].values)))])
        scales = [_scale_of(column, lengths[0], outline.filled) for column in columns]
        scale = scale_of_columns(train.stored_inputs, scales)
    # Nobody goes on before the leader has filled the arrays: the scale comes after them.
    scale = cast(Scale, node.broadcast_object(scale))
    ends = list(accumulate(lengths))
    spans = (slice(end - length, end) for end, length in zip(ends, lengths, strict=True))

    def with_memory(part: Part) -> Part:
        span = next(spans)
        inputs = [replace(column, rows=column.rows[span]) for column in columns]
        return Part(in_place_of(part.stored_inputs, inputs), targets[span], scale)

    return outline.with_parts(with_memory)


@dataclass(frozen=True)
class _Choice:
    """The decision to stream the data: on all hosts, or on none.

    Attributes:
        wanted: whether they are.
        given: the folder, if they can be.
        data: what is to be read otherwise.
        options: of that.
    """

    wanted: bool
    given: Streamable | None
    data: object
    options: Mapping[str, object]


def _streamed(data: object, options: Mapping[str, object], comm: Communicator) -> _Choice:
    """Decide whether data are streamed (collective); only the first rank of each host looks at them."""
    given: Streamable | UserError | None = None
    if comm.node.rank == 0:
        try:
            data = local_copy(data)
            given = streamable(data, options)
            options = without_stream(data, options)
        except UserError as error:
            given = error
    said = None if given is None else given.wanted if isinstance(given, Streamable) else given
    told = cast("list[bool | UserError | None]", comm.all_gather_objects(said))
    for one in told:
        if isinstance(one, UserError):
            raise one
    return _Choice(True in told, cast("Streamable | None", given), data, options)


_STREAMED: Final = (
    "write it as NPY files by: tutti data convert DATA NEW, and give --data NEW: such a folder is streamed"
)


def refuse_too_large(name: str, nbytes: int, remedy: str = _STREAMED) -> None:
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


def _find(
    contents: Contents[Stored[Rows], Array], validation: float, seed: int
) -> tuple[DataSet, int, _Pieces]:
    """Return the data set, with tensors that have no memory, a checksum of its targets, and its pieces."""
    own, test = contents.parts.get("validation"), contents.parts.get("test")
    inputs, targets = train = contents.parts["train"]
    kept, aside = split(targets, 0 if own else validation, seed, contents.classes)
    pieces = [(train, kept), (own, np.arange(len(own[1]))) if own else (train, aside)]
    pieces.append((test, np.arange(len(test[1]))) if test else (train, np.arange(0)))
    checksum = 0
    for (_, values), indices in pieces:
        checksum = zlib.crc32(values[indices].tobytes(), checksum)
    y = torch.from_numpy(targets[:0])
    parts = [
        Part(
            in_place_of(inputs, [_without_memory(column, len(indices)) for column in columns_of(inputs)]),
            y.new_empty(len(indices), *y.shape[1:], device="meta"),
        )
        for _, indices in pieces
    ]
    first, second, third = (part if len(part) else None for part in parts)
    outline = DataSet(
        contents.name,
        cast(Part, first),
        second,
        third,
        contents.classes,
        contents.labels,
        contents.filled,
        contents.columns,
    )
    return outline, checksum, pieces


def _without_memory(column: Column[Rows], samples: int) -> Column[Tensor]:
    rows, values = column.rows, column.values
    kept = torch.from_numpy(rows[:0].astype(stored_dtype(rows)))
    laid = kept.new_empty(samples, *rows.shape[1:], device="meta")
    if values is None:
        return Column(laid)
    kept = torch.from_numpy(values[:0].astype(stored_dtype(values)))
    return Column(laid, kept.new_empty(values.shape, device="meta"), column.longest)


def _fill(memory: Tensor, pieces: Sequence[tuple[Rows, Indices]]) -> None:
    """Write samples into memory, one piece after the other."""
    x, start = memory.numpy(), 0
    for stored, indices in pieces:
        step = samples_per_chunk(stored)
        for chunk in np.split(indices, range(step, len(indices), step)):
            # Chunks go straight to their place, so that no second copy of the data ever exists.
            x[start : start + len(chunk)] = stored[chunk]
            start += len(chunk)


def _scale_of(column: Column[Tensor], trained: int, filled: bool) -> Scale:
    """Return the scale of an input from the first samples, which are those of the training part."""
    if column.values is not None:
        return Scale()
    rows = column.rows.numpy()[:trained]
    if rows.dtype == np.uint8:
        return pixel_scale(rows)
    return mean_scale(rows) if filled and rows.dtype.kind == "f" else Scale()
