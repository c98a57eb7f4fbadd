"""Rows of tensors that lie on several ranks, brought together on rank 0."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from tutti.comm.base import Communicator

PIECE: Final = 1 << 22
"""The numbers that go into one message."""

Kind = tuple[tuple[int, ...], torch.dtype]
"""The shape and type of a tensor."""


def gather_rows(rows: tuple[Tensor, ...], comm: Communicator) -> tuple[Tensor, ...]:
    """Bring the rows of all ranks together, in the order of the ranks (collective).

    Args:
        rows: tensors of shape (n, ...) on the CPU, as many on each rank that has some; else empty.
        comm: all ranks.

    Returns:
        On rank 0 tensors of shape (total, ...); empty where no rank has rows, and on the other ranks.
    """
    mine: list[Kind] = [(tuple(tensor.shape), tensor.dtype) for tensor in rows]
    kinds = cast("list[list[Kind]]", comm.all_gather_objects(mine))
    if comm.rank:
        for tensor in rows:
            for piece in torch.split(tensor.contiguous().view(-1), PIECE):
                comm.send(piece, 0)
        return ()
    found = [rows] if rows else []
    for rank, theirs in enumerate(kinds[1:], start=1):
        if theirs:
            found.append(tuple(_received(shape, dtype, rank, comm) for shape, dtype in theirs))
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _received(shape: tuple[int, ...], dtype: torch.dtype, rank: int, comm: Communicator) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    for piece in torch.split(tensor.view(-1), PIECE):
        comm.recv(piece, rank)
    return tensor
