"""Opening a data set: one rank of each host reads it, into memory that all ranks of the host share."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from tutti.data.arrays import Array, samples_per_chunk, stored_dtype
from tutti.data.contents import Contents
from tutti.data.parts import PIXEL_MAX, DataSet, Part, Scale
from tutti.data.sources import read_source
from tutti.data.splits import Indices, split
from tutti.errors import BadData, BadOption, UserError


class SharingRanks(Protocol):
    """The part of a communicator that is used here; every communicator has it."""

    rank: int

    @property
    def node(self) -> SharingRanks:
        """The ranks of this host."""

    def broadcast_object(self, value: object, root: int = 0) -> object:
        """Return the value of rank `root`, on every rank."""

    def all_gather_objects(self, value: object) -> list[object]:
        """Return the values of all ranks, on every rank."""

    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate zeros that every rank of the host sees."""


@dataclass(frozen=True)
class ArrayLayout:
    """The layout of the shared arrays: train, then validation, then test. The same on every host."""

    name: str
    lengths: tuple[int, int, int]
    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target_shape: tuple[int, ...]
    target_dtype: torch.dtype
    classes: int | None
    labels: tuple[str, ...]
    checksum: int


@dataclass(frozen=True)
class _Plan:
    """The layout of a data set, and the order in which its samples go into the shared arrays."""

    layout: ArrayLayout
    pieces: tuple[tuple[tuple[Array, Array], Indices], ...]


def open_data(
    data: object,
    comm: SharingRanks,
    validation: float = 0.1,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
) -> DataSet:
    """Open a data set (collective): it is read once per host, into memory that the host's ranks share.

    8-bit inputs stay 8-bit; batches of them become float32 of mean 0 and deviation 1 per channel over the
    training samples. Floats are kept as float32 (torch's default type), not scaled; other integers as int64.

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

    Returns:
        The data set; its arrays are views of shared memory.

    Raises:
        BadData: the data are missing, broken, or do not fit together. Every rank raises the same error.
        NotFinite: NaN or inf in the data.
        BadOption: an option that cannot be used.
        UnknownName: no such built-in data set, file, factory or option.
    """
    node = comm.node
    plan = _plan_or_error(data, validation, seed, dict(options or {})) if node.rank == 0 else None
    outcome = node.broadcast_object(plan.layout if isinstance(plan, _Plan) else plan)
    layout = _agreed(cast("ArrayLayout | UserError", outcome), comm)
    total = sum(layout.lengths)
    inputs = node.shared(total, *layout.input_shape, dtype=layout.input_dtype)
    targets = node.shared(total, *layout.target_shape, dtype=layout.target_dtype)
    scale = _fill(inputs, targets, plan) if isinstance(plan, _Plan) else None
    # Nobody goes on before the leader has filled the arrays: the scale comes after them.
    scale = cast(Scale, node.broadcast_object(scale))
    return _data_set(layout, inputs, targets, scale)


def _plan_or_error(
    data: object, validation: float, seed: int, options: Mapping[str, object]
) -> _Plan | UserError:
    """Return an error instead of raising it: the host's other ranks wait for the leader's word."""
    try:
        if not 0 <= validation < 1:
            raise BadOption(f"the validation share is {validation}; give at least 0 and below 1, such as 0.1")
        return _plan(read_source(data, options), validation, seed)
    except UserError as error:
        return error


def _plan(contents: Contents[Array], validation: float, seed: int) -> _Plan:
    own, test = contents.parts.get("validation"), contents.parts.get("test")
    inputs, targets = train = contents.parts["train"]
    kept, aside = split(targets, 0 if own else validation, seed, contents.classes)
    pieces = [(train, kept), (own, np.arange(len(own[0]))) if own else (train, aside)]
    pieces.append((test, np.arange(len(test[0]))) if test else (train, np.arange(0)))
    checksum = 0
    for (_, values), indices in pieces:
        checksum = zlib.crc32(values[indices].tobytes(), checksum)
    layout = ArrayLayout(
        name=contents.name,
        lengths=(len(pieces[0][1]), len(pieces[1][1]), len(pieces[2][1])),
        input_shape=inputs.shape[1:],
        input_dtype=_torch_dtype(stored_dtype(inputs)),
        target_shape=targets.shape[1:],
        target_dtype=_torch_dtype(targets.dtype),
        classes=contents.classes,
        labels=contents.labels,
        checksum=checksum,
    )
    return _Plan(layout, tuple(pieces))


def _agreed(outcome: ArrayLayout | UserError, comm: SharingRanks) -> ArrayLayout:
    """Return the layout that all hosts found, or raise the first host's error on every rank."""
    outcomes = cast("list[ArrayLayout | UserError]", comm.all_gather_objects(outcome))
    for rank, other in enumerate(outcomes):
        if isinstance(other, UserError):
            raise other
        if other != outcomes[0]:
            raise BadData(
                f"the hosts read different data: rank 0 has '{_summary(cast(ArrayLayout, outcomes[0]))}', "
                f"rank {rank} has '{_summary(other)}'; copy the same files to every host"
            )
    return cast(ArrayLayout, outcome)


def _summary(layout: ArrayLayout) -> str:
    train, validation, test = layout.lengths
    return (
        f"{layout.name}: {train:,} train, {validation:,} validation, {test:,} test, "
        f"inputs {layout.input_shape}, checksum of the targets {layout.checksum:08x}"
    )


def _fill(inputs: Tensor, targets: Tensor, plan: _Plan) -> Scale:
    x, y = inputs.numpy(), targets.numpy()
    start = 0
    for (stored, wanted), indices in plan.pieces:
        step = samples_per_chunk(stored)
        for chunk in np.split(indices, range(step, len(indices), step)):
            # Chunks go straight to their place, so that no second copy of the data ever exists.
            x[start : start + len(chunk)] = stored[chunk]
            y[start : start + len(chunk)] = wanted[chunk]
            start += len(chunk)
    return pixel_scale(x[: plan.layout.lengths[0]]) if x.dtype == np.uint8 else Scale()


def pixel_scale(inputs: Array) -> Scale:
    """Return the scale that gives 8-bit inputs mean 0 and deviation 1, exact, per channel if there are any.

    Args:
        inputs: of shape (samples, ...); of four dimensions, the second is the channel.
    """
    channels = inputs.shape[1] if inputs.ndim == 4 else 1
    total, squares = np.zeros(channels), np.zeros(channels)
    # Pieces of about 2^16 values in double precision stay in the cache, and sums of whole numbers are exact.
    step = max(1, (1 << 16) * len(inputs) // inputs.size)
    for start in range(0, len(inputs), step):
        chunk = inputs[start : start + step]
        for channel in range(channels):
            values = (chunk[:, channel] if channels > 1 else chunk).astype(np.float64).reshape(-1)
            total[channel] += values.sum()
            squares[channel] += values @ values
    count = inputs.size / channels
    mean = total / count
    variance = squares / count - mean**2
    # A channel that never varies has no deviation to divide by; it becomes 0.
    std = np.where(variance > 0, np.sqrt(np.maximum(variance, 0)), PIXEL_MAX)
    return Scale(tuple((mean / PIXEL_MAX).tolist()), tuple((std / PIXEL_MAX).tolist()))


def _data_set(layout: ArrayLayout, inputs: Tensor, targets: Tensor, scale: Scale) -> DataSet:
    parts: list[Part | None] = []
    start = 0
    for length in layout.lengths:
        end = start + length
        parts.append(Part(inputs[start:end], targets[start:end], scale) if length else None)
        start = end
    train, validation, test = parts
    return DataSet(
        name=layout.name,
        train=cast(Part, train),
        validation=validation,
        test=test,
        classes=layout.classes,
        labels=layout.labels,
        shape=layout.input_shape,
    )


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
