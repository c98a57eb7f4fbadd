"""Where the pieces of a long vector lie in the rows, and how bytes come there and back.

Bytes are moved by the C library: it takes an address where torch would have to make a view, and it writes
whole cache lines without fetching them first from the core that had them last.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from tutti.comm.base import cut
from tutti.comm.reductions import Reduction

move: Final = ctypes.CDLL(None).memmove
"""Move bytes: to an address, from an address, so many. Other threads run meanwhile."""

move_few: Final = ctypes.PyDLL(None).memmove
"""The same, for so few that to let other threads run would take longer."""

for _function in (move, move_few):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None

_Stretch = tuple[int, int, int]
"""The address of a place in a row, the offset in bytes of its content in the vector, and its bytes."""


class Piece:
    """A piece of a vector, of which each rank owns a slice.

    Args:
        rank: this process's number in the group.
        rows: of all ranks, as far as they are for this piece.
        begin: at which element of the vector the piece begins.
        length: how many elements it has.
    """

    def __init__(self, rank: int, rows: Sequence[Tensor], begin: int, length: int) -> None:
        def stretch(row: Tensor, part: slice) -> _Stretch:
            item = row.itemsize
            at, nbytes = begin + part.start, part.stop - part.start
            return row.data_ptr() + part.start * item, at * item, nbytes * item

        slices = cut(length, len(rows))
        own = slices[rank]
        others = [(owner, part) for owner, part in enumerate(slices) if owner != rank]
        self._rank, self._own = rank, slice(begin + own.start, begin + own.stop)
        self._found = [row[own] for row in rows]
        self._mine = stretch(rows[_home(rank)], own)
        self._given = [stretch(rows[rank], part) for _, part in others]
        self._made = [stretch(rows[_home(owner)], part) for owner, part in others]

    def put(self, vector: int) -> None:
        """Give the others what they own of the vector at this address."""
        for place, offset, nbytes in self._given:
            move(place, vector + offset, nbytes)

    def fold(self, vector: Tensor, way: Reduction) -> None:
        """Make the slice that this rank owns, here and for the others."""
        found, own = [*self._found], vector[self._own]
        found[self._rank] = own
        # What is folded last cannot be the result, too.
        result = own if self._rank < 2 else found[0]
        way.fold(found, result)
        if result is own:
            place, _, nbytes = self._mine
            move(place, own.data_ptr(), nbytes)
        else:
            own.copy_(result)

    def take(self, vector: int) -> None:
        """Take what the others have made of the vector at this address."""
        for place, offset, nbytes in self._made:
            move(vector + offset, place, nbytes)


def _home(owner: int) -> int:
    """The row in which the owner of a slice leaves the result: one that it has read already."""
    return 0 if owner else 1
