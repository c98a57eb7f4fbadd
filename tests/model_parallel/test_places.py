"""Parts of a tensor, cut along any dimension, become the whole again, in whatever slices they are saved."""

from __future__ import annotations

import pytest
import torch

from tutti.model_parallel.places import PartPlace
from tutti.state import TensorPiece, joined, whole_piece


@pytest.mark.parametrize(
    ("shape", "dim", "order"),
    [
        ((5, 3), 0, torch.contiguous_format),
        ((3, 5), 1, torch.contiguous_format),
        ((2, 5, 3), 1, torch.contiguous_format),
        ((5,), 0, torch.contiguous_format),
        ((5, 3, 2, 2), 0, torch.channels_last),
        ((2, 5, 3, 2), 1, torch.channels_last),
        ((2, 2, 5, 3), 2, torch.channels_last),
    ],
)
@pytest.mark.parametrize("length", [1, 4, 100])
def test_parts_become_the_whole(
    shape: tuple[int, ...], dim: int, order: torch.memory_format, length: int
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape).contiguous(memory_format=order)
    pieces: list[TensorPiece] = []
    for start, stop in ((0, 3), (3, 5), (5, 5)):  # as of a dimension that is shorter than there are ranks
        part = whole.narrow(dim, start, stop - start).contiguous(memory_format=order)
        place = PartPlace.along("w", part, dim, shape[dim], start)
        assert torch.equal(whole[place.index], part)
        found = whole_piece("w", part)
        for at in range(0, len(found.values), length):
            values = found.values[at : at + length]
            pieces += place.pieces(TensorPiece("w", at, values, found.shape, found.order))
    made = joined(pieces)["w"]
    assert torch.equal(made, whole)
    assert made.stride() == whole.stride()
    assert sum(len(piece.values) for piece in pieces) == whole.numel()
