"""Inputs without targets, of any size: one rank of a host reads some at a time for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.data.arrays import stored_dtype
from tutti.data.rows import Rows
from tutti.data.sources import read_inputs
from tutti.errors import BadData, UserError

BLOCK_BYTES: Final = 1 << 26
"""The memory of the inputs that are read at a time, about."""


@dataclass(frozen=True)
class InputsOutline:
    """The size and kind of the inputs of a data set.

    Attributes:
        name: of the data set.
        part: "train", "validation" or "test"; None: there are no others.
        samples: how many.
        shape: of one input.
        dtype: of the inputs as they are kept.
        columns: the names of the inputs, where each is a column of a table.
    """

    name: str
    part: str | None
    samples: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: tuple[str, ...]


class InputStream:
    """The inputs of a part of a data set. Made by `open_inputs`.

    Args:
        outline: what they are.
        comm: all ranks.
        rows: the inputs; None on ranks that do not read them.

    Attributes:
        outline: likewise.
    """

    def __init__(self, outline: InputsOutline, comm: Communicator, rows: Rows | None) -> None:
        self.outline, self._node, self._rows = outline, comm.node, rows

    def blocks(self, unit: int) -> Iterator[Tensor]:
        """Yield the inputs as they are stored, in their order, some at a time (collective).

        Args:
            unit: each block but the last has so many samples, or a multiple of them.

        Yields:
            Inputs of shape (samples, ...), in memory that the next block takes.
        """
        outline, node = self.outline, self._node
        each = max(1, math.prod(outline.shape) * outline.dtype.itemsize)
        size = min(unit * max(1, BLOCK_BYTES // (each * unit)), outline.samples)
        memory = node.shared(size, *outline.shape, dtype=outline.dtype)
        for start in range(0, outline.samples, size):
            block = memory[: min(size, outline.samples - start)]
            node.barrier()  # Nobody computes with the block before any more.
            if self._rows is not None:
                block.numpy()[:] = self._rows[start : start + len(block)]
            node.barrier()
            yield block


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
    node, rows = comm.node, None
    found: InputsOutline | UserError | None = None
    if node.rank == 0:
        try:
            found, rows = _find(data, options, part)
        except UserError as error:
            found = error  # the host's other ranks wait for the leader's word
    outline = node.broadcast_object(found)
    outlines = cast("list[InputsOutline | UserError]", comm.all_gather_objects(outline))
    for rank, one in enumerate(outlines):
        if isinstance(one, UserError):
            raise one
        if one != outlines[0]:
            raise BadData(
                f"the hosts read different data: rank {rank} has others than rank 0; copy the same files to "
                "every host"
            )
    return InputStream(cast("InputsOutline", outline), comm, rows)


def _find(data: object, options: Mapping[str, object], part: str | None) -> tuple[InputsOutline, Rows]:
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
    rows, _ = contents.parts[wanted]
    dtype = torch.from_numpy(rows[:0].astype(stored_dtype(rows))).dtype
    named = None if only else wanted
    outline = InputsOutline(contents.name, named, len(rows), rows.shape[1:], dtype, contents.columns)
    return outline, rows
