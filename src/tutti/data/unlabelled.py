"""Inputs without targets, of any size: one rank of a host reads some at a time for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.data.agreement import agreed
from tutti.data.arrays import stored_dtype
from tutti.data.columns import Column, Stored, columns_of, in_place_of
from tutti.data.rows import Rows
from tutti.data.sources import read_inputs
from tutti.errors import BadData

BLOCK_BYTES: Final = 1 << 26
"""The memory of the inputs that are read at a time, about."""


@dataclass(frozen=True)
class InputsOutline:
    """The size and kind of the inputs of a data set.

    Attributes:
        name: of the data set.
        part: "train", "validation" or "test"; None: there are no others.
        samples: how many.
        inputs: as they are kept, in tensors without memory.
        columns: the names of the inputs, where each is a column of a table.
    """

    name: str
    part: str | None
    samples: int
    inputs: Stored[Tensor]
    columns: tuple[str, ...]


class InputStream:
    """The inputs of a part of a data set. Made by `open_inputs`.

    Args:
        outline: what they are.
        comm: all ranks.
        stored: the inputs; None on ranks that do not read them.

    Attributes:
        outline: likewise.
    """

    def __init__(self, outline: InputsOutline, comm: Communicator, stored: Stored[Rows] | None) -> None:
        self.outline, self._node, self._stored = outline, comm.node, stored

    def blocks(self, unit: int) -> Iterator[Stored[Tensor]]:
        """Yield the inputs as they are stored, in their order, some at a time (collective).

        Args:
            unit: each block but the last has so many samples, or a multiple of them.

        Yields:
            Inputs of some samples, in memory that the next block takes.
        """
        outline, node = self.outline, self._node
        columns = columns_of(outline.inputs)
        nbytes = sum(
            one.nbytes for column in columns for one in (column.rows, column.values) if one is not None
        )
        each = max(1, nbytes // max(1, outline.samples))
        size = min(unit * max(1, BLOCK_BYTES // (each * unit)), outline.samples)
        starts = range(0, outline.samples, size)
        stored = None if self._stored is None else columns_of(self._stored)
        # The values of sequences in each block: where they begin, and where they end.
        found = None if stored is None else [_ends(one, [*starts, outline.samples]) for one in stored]
        ends = cast("list[list[int]]", node.broadcast_object(found))
        memory = [_memory(node, size, one, end) for one, end in zip(columns, ends, strict=True)]
        for number, start in enumerate(starts):
            count = min(size, outline.samples - start)
            node.barrier()  # Nobody computes with the block before any more.
            if stored is not None:
                for into, one, end in zip(memory, stored, ends, strict=True):
                    _fill(into, one, slice(start, start + count), slice(*end[number : number + 2]))
            node.barrier()
            yield in_place_of(
                outline.inputs,
                [_begin_of(into, count, end, number) for into, end in zip(memory, ends, strict=True)],
            )


def _ends(column: Column[Rows], numbers: Sequence[int]) -> list[int]:
    """Return where the values of each of some samples begin; of the one behind the last, where they end."""
    if column.values is None:
        return [0] * len(numbers)
    lengths = column.rows[:][:, 1]
    first = int(column.rows[:1][0, 0]) if len(lengths) else 0
    before = np.concatenate([[0], lengths.cumsum()])
    return [first + int(before[number]) for number in numbers]


def _memory(node: Communicator, samples: int, column: Column[Tensor], ends: Sequence[int]) -> Column[Tensor]:
    """Return memory that all ranks of the host see, for the largest block of a column."""
    rows = node.shared(samples, *column.rows.shape[1:], dtype=column.rows.dtype)
    if column.values is None:
        return Column(rows)
    most = max(stop - start for start, stop in pairwise(ends))
    values = node.shared(max(1, most), *column.values.shape[1:], dtype=column.values.dtype)
    return Column(rows, values, column.longest)


def _fill(memory: Column[Tensor], column: Column[Rows], samples: slice, values: slice) -> None:
    """Read some samples of a column, and the values of its sequences, into memory."""
    rows = column.rows[samples]
    if memory.values is not None and column.values is not None:
        memory.values.numpy()[: values.stop - values.start] = column.values[values]
        rows = rows - [values.start, 0]
    memory.rows.numpy()[: len(rows)] = rows


def _begin_of(memory: Column[Tensor], samples: int, ends: Sequence[int], number: int) -> Column[Tensor]:
    """Return the part of memory that a block has filled."""
    values = None if memory.values is None else memory.values[: ends[number + 1] - ends[number]]
    return Column(memory.rows[:samples], values, memory.longest)


def open_inputs(
    data: object, comm: Communicator, options: Mapping[str, object], part: str | None = None
) -> InputStream:
    """Open the inputs of a data set, whether or not it has targets (collective).

    Args:
        data: as for `tutti.data.open_data`; only the first rank of each host looks at it.
        comm: all ranks.
        options: likewise.
        part: "train", "validation" or "test"; None: the test part, or the only one.

    Raises:
        UserError: as `open_data` does; on every rank the same.
    """
    read: list[Stored[Rows]] = []

    def look() -> InputsOutline:
        outline, stored = _find(data, options, part)
        read.append(stored)
        return outline

    outline = agreed(comm, look)
    return InputStream(outline, comm, read[0] if read else None)


def _find(
    data: object, options: Mapping[str, object], part: str | None
) -> tuple[InputsOutline, Stored[Rows]]:
    contents = read_inputs(data, options)
    only = next(iter(contents.parts)) if len(contents.parts) == 1 else None
    wanted = part or only or "test"
    # The only part of a file is called the training part, whatever it is for.
    if wanted not in contents.parts:
        have = ", ".join(contents.parts)
        raise BadData(
            f"{contents.name} has no {wanted} part; it has: {have}. "
            + ("Leave --part out" if only else "Choose one with --part")
        )
    stored, _ = contents.parts[wanted]
    columns = [_without_memory(column) for column in columns_of(stored)]
    named = None if only else wanted
    inputs = in_place_of(stored, columns)
    return InputsOutline(contents.name, named, len(columns[0].rows), inputs, contents.columns), stored


def _without_memory(column: Column[Rows]) -> Column[Tensor]:
    def kept(rows: Rows) -> Tensor:
        dtype = torch.from_numpy(rows[:0].astype(stored_dtype(rows))).dtype
        return torch.empty(rows.shape, dtype=dtype, device="meta")

    return column.changed(kept)
