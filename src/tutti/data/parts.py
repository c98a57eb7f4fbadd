"""An open data set: parts in memory, and the scale from stored numbers to model inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from tutti.data.columns import (
    LENGTHS,
    Column,
    Columns,
    Inputs,
    Stored,
    alone,
    columns_of,
    each_of,
    in_place_of,
    mask_of,
    named,
    names_beside,
    padded,
)
from tutti.data.rows import Indices, rows_of_kept
from tutti.records.preparation import Preparation, Table, TableInputs
from tutti.records.texts import Shape

T = TypeVar("T")
U = TypeVar("U")

PIXEL_MAX = 255.0
"""The divisor of uint8 inputs, so that means and deviations are those of pixels between 0 and 1."""


@dataclass(frozen=True)
class Scale:
    """The map from stored inputs to the model's: (x / 255 - mean) / std in float32, or x itself, filled.

    Attributes:
        mean: of x / 255, one value for all or one per channel (dimension 1); empty: inputs are not scaled.
        std: the standard deviation likewise.
        fill: the replacement of NaN, one value for each input; empty: there is none.
        each: the scale of each column, if the inputs are columns; empty: they are one input.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fill: tuple[float, ...] = ()
    each: tuple[Scale, ...] = ()

    @cached_property
    def _line(self) -> tuple[Tensor, Tensor, float]:
        """Factor and offset of each channel, and the first factor as a number."""
        mean, std = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        factor, offset = (1 / (PIXEL_MAX * std)).float(), (-mean / std).float()
        return factor, offset, factor[0].item()

    @cached_property
    def _filler(self) -> Tensor:
        return torch.tensor(self.fill, dtype=torch.float64)

    def apply(self, stored: Tensor) -> Tensor:
        """Return the model's inputs for `stored`, of the same shape; float32 if there is a scale."""
        if self.fill:
            filler = self._filler.to(stored).view(1, *stored.shape[1:])
            return torch.where(stored.isnan(), filler, stored)
        if not self.mean:
            return stored
        seen, (factor, offset, first) = stored.to(torch.float32, copy=True), self._line
        if len(self.mean) == 1:
            # One vectorised sweep over the fresh copy: offset + factor * x.
            return torch.add(offset, seen, alpha=first, out=seen)
        per_channel = (1, -1) + (1,) * (stored.dim() - 2)
        return seen.mul_(factor.view(per_channel)).add_(offset.view(per_channel))

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of a table; None: there is no table."""
        return None

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a model input, given a stored one's."""
        return stored

    def apply_to_all(self, stored: Inputs) -> Inputs:
        """Return the model's inputs, one or several; lengths of sequences are unchanged."""
        if isinstance(stored, Tensor):
            return self.apply(stored)
        found = [
            one if scale is None else scale.apply(one)
            for one, scale in zip_longest(each_of(stored), self.each[: len(stored)])
        ]
        return named(found, tuple(stored) if isinstance(stored, dict) else ())

    def on(self, device: str) -> Scale:
        """Copy the scale for inputs in the memory of a device."""
        moved = Scale(self.mean, self.std, self.fill, tuple(one.on(device) for one in self.each))
        if self.fill:
            vars(moved)["_filler"] = self._filler.to(device)
        if self.mean:
            factor, offset, first = self._line
            vars(moved)["_line"] = factor.to(device), offset.to(device), first
        return moved


@dataclass(frozen=True)
class Part:
    """One part of a data set. All ranks of the host see the same memory: do not write to it.

    Attributes:
        stored_inputs: of shape (samples, ...); images are (samples, channels, height, width), uint8 as
            stored. Columns, if a sample has several inputs, or sequences.
        stored_targets: class numbers, int64, of shape (samples,), or (samples, ...) with one for each
            position; or float values of shape (samples, ...).
        scale: turns stored inputs into the model's.
        rows: the stored samples of this part, int64, in its order; None: all.
        stored_weights: of shape (samples,), float64; None: each sample counts once.
        left_out: the rows of the source, ascending, that are not stored; None: all are.
        fingerprint: identifies the stored samples; the same for any type of floats.
    """

    stored_inputs: Stored[Tensor]
    stored_targets: Tensor
    scale: Scale = field(default_factory=Scale)
    rows: Tensor | None = None
    stored_weights: Tensor | None = None
    left_out: Indices | None = None
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.stored_targets if self.rows is None else self.rows)

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order in which an epoch takes the samples: their positions, int64."""
        return torch.randperm(len(self), generator=epoch_generator(seed, epoch))

    def expect(self, order: Tensor, start: int) -> None:
        """Prepare to read the samples of an epoch's order from position `start` on."""

    def waited_s(self) -> Mapping[str, float]:
        """Return the seconds that this rank has waited for files since the last call, by stage."""
        return {}

    def take(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Copy the inputs, as the model sees them, and the targets of some samples.

        `indices` are positions in this part, of shape (count,), int64. Sequences are padded with zeros to the
        longest of these samples, and come with their lengths.
        """
        indices = indices.to(self.device)
        if self.rows is not None:
            indices = self.rows.index_select(0, indices)
        return self._seen(indices), self.stored_targets.index_select(0, indices)

    def weights_of(self, indices: Tensor) -> Tensor | None:
        """Copy the weights of some samples; None: they have none."""
        if self.stored_weights is None:
            return None
        indices = indices.to(self.device)
        return self.stored_weights[indices if self.rows is None else self.rows[indices]]

    def _seen(self, indices: Tensor) -> Inputs:
        """Copy the inputs of some stored samples, as the model sees them, and the lengths of sequences."""
        stored = self.stored_inputs
        if not isinstance(stored, Columns):
            return self.scale.apply(stored.index_select(0, indices))
        found: list[Tensor] = []
        beside: list[Tensor] = []
        scales = self.scale.each or [Scale()] * len(stored.columns)
        for column, scale in zip(stored.columns, scales, strict=True):
            rows = column.rows.index_select(0, indices)
            if column.values is not None:
                rows, length = padded(column, rows)
                beside.append(length if stored.beside == LENGTHS else mask_of(rows, length))
            found.append(scale.apply(rows))
        last = names_beside(stored)
        return named([*found, *beside[: len(last)]], stored.names and (*stored.names, *last))

    def source_rows(self, start: int, stop: int) -> Indices:
        """Return the rows of the source that the samples from `start` to before `stop` are."""
        rows = (torch.arange(start, stop) if self.rows is None else self.rows[start:stop]).numpy()
        return rows if self.left_out is None else rows_of_kept(rows, self.left_out)

    @property
    def inputs(self) -> Stored[Tensor]:
        """The stored inputs of its samples: a copy, if it has rows."""
        return self.stored_inputs if self.rows is None else self._inputs_of(self.rows)

    def _inputs_of(self, rows: Tensor) -> Stored[Tensor]:
        columns = columns_of(self.stored_inputs)
        some = [replace(column, rows=column.rows.index_select(0, rows)) for column in columns]
        return in_place_of(self.stored_inputs, some)

    @property
    def targets(self) -> Tensor:
        """The targets of its samples: a copy, if it has rows."""
        return self.stored_targets if self.rows is None else self.stored_targets.index_select(0, self.rows)

    @property
    def shape(self) -> Shape:
        """The shape of one input, such as (1, 28, 28); several inputs have several.

        The first size of a sequence is the length of the data set's longest.
        """
        stored = self.stored_inputs
        return shape_of(stored) if isinstance(stored, Columns) else self.scale.shape(tuple(stored.shape[1:]))

    @property
    def device(self) -> torch.device:
        """The memory that holds the samples."""
        return self.stored_targets.device

    def stretch(self, positions: slice) -> Part:
        """Return a copy of the samples at some positions, as a view would be pickled with all others."""
        every = torch.arange(len(self.stored_targets), device=self.device) if self.rows is None else self.rows
        some = every[positions]
        inputs = self._inputs_of(some)
        copied = in_place_of(inputs, [alone(column) for column in columns_of(inputs)])
        part = self._counted(lambda stored: stored.index_select(0, some))
        return replace(part, stored_inputs=copied, rows=None)

    def on(self, device: str, copied: Callable[[Tensor], Tensor] | None = None) -> Part:
        """Copy it to the memory of a device; `copied` copies tensors shared with other parts."""
        moved = self.changed(copied or (lambda stored: stored.to(device)))
        return moved.with_rows(None if self.rows is None else self.rows.to(device), self.scale.on(device))

    def with_rows(self, rows: Tensor | None, scale: Scale) -> Part:
        """Return the part of other stored samples, with a scale."""
        return replace(self, rows=rows, scale=scale)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Part:
        """Return the part with each of its `tensors` replaced."""
        columns = [column.changed(change) for column in columns_of(self.stored_inputs)]
        return replace(self._counted(change), stored_inputs=in_place_of(self.stored_inputs, columns))

    def _counted(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the part with other targets and weights."""
        weights = None if self.stored_weights is None else change(self.stored_weights)
        return replace(self, stored_targets=change(self.stored_targets), stored_weights=weights)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors in memory that store samples."""
        for column in columns_of(self.stored_inputs):
            if column.values is not None:
                yield column.values
            yield column.rows
        yield self.stored_targets
        if self.stored_weights is not None:
            yield self.stored_weights


def shape_of(stored: Stored[Tensor]) -> Shape:
    """Return the shape of the inputs of one sample; see `Part.shape`."""
    if not isinstance(stored, Columns):
        return tuple(stored.shape[1:])
    shapes = [column_shape(column) for column in stored.columns]
    # A data set of sequences alone has one input, as far as the model that is built for it is concerned.
    return named(shapes, stored.names) if stored.names or len(shapes) > 1 else shapes[0]


def column_shape(column: Column[Tensor]) -> tuple[int, ...]:
    """Return the shape of one input; the first size of a sequence is the longest length."""
    if column.values is None:
        return tuple(column.rows.shape[1:])
    return (column.longest, *column.values.shape[1:])


def scale_of_columns(stored: object, scales: Sequence[Scale]) -> Scale:
    """Return the scale of inputs, given their columns' scales."""
    return Scale(each=tuple(scales)) if isinstance(stored, Columns) else scales[0]


@dataclass(frozen=True)
class DataSet:
    """A data set in memory. Made by `open_data`.

    Attributes:
        name: for people to read.
        train: the samples to train on.
        validation: held out from the training samples, to watch the training; None if its share is 0.
        test: for the final figure only; None if the source has none.
        classes: the number of classes; None if the targets are floats.
        labels: the names of the classes, or of flags: texts, whole numbers or booleans; empty if unknown.
        filled: means of the training samples replace inputs that are NaN.
        columns: the names of the inputs, if each is a column of a table.
        table: these columns, if they are to be prepared.
    """

    name: str
    train: Part
    validation: Part | None
    test: Part | None
    classes: int | None
    labels: tuple[Any, ...]
    filled: bool = False
    columns: tuple[str, ...] = ()
    table: Table | None = None

    @property
    def fingerprint(self) -> str:
        """Identifies the training samples of the source."""
        return self.train.fingerprint

    @property
    def shape(self) -> Shape:
        """The shape of one input as the model sees it, such as (1, 28, 28); see `Part.shape`."""
        return self.train.shape

    @property
    def table_inputs(self) -> TableInputs | None:
        """The inputs as the model sees them, if they are a prepared table."""
        preparation = self.train.scale.preparation
        return None if preparation is None else preparation.inputs

    @property
    def parts(self) -> list[Part]:
        """The existing parts: train, validation, test."""
        return [part for part in (self.train, self.validation, self.test) if part is not None]

    @property
    def weighted(self) -> bool:
        """True if samples of some part have weights."""
        return any(part.stored_weights is not None for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The memory of its parts in bytes; shared memory counts once."""
        return sum({id(one): one.nbytes for part in self.parts for one in part.tensors()}.values())

    def with_parts(self, change: Callable[[Part], Part]) -> DataSet:
        """Return it with each part changed, in the order of `parts`."""
        train = change(self.train)
        validation, test = (None if part is None else change(part) for part in (self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test)

    def on(self, device: str) -> DataSet:
        """Copy it to the memory of a device, such as "cuda"; tensors shared by parts are copied once."""
        copied: Callable[[Tensor], Tensor] = once(lambda stored: stored.to(device))
        return self.with_parts(lambda part: part.on(device, copied))


def once(change: Callable[[T], U]) -> Callable[[T], U]:
    """Return a function that changes each object once, and later returns the same result."""
    seen: dict[int, tuple[T, U]] = {}

    def changed(one: T) -> U:
        if id(one) not in seen:
            seen[id(one)] = one, change(one)
        return seen[id(one)][1]

    return changed


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator of an epoch."""
    # SeedSequence mixes the bits, so that neighbouring seeds and epochs have unrelated orders.
    mixed = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed))
