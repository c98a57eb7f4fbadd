"""What a rank called, in one word: ranks that call different things are told so instead of hanging."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import torch

from tutti.comm.reductions import REDUCTION_NAMES
from tutti.comm.rings import DTYPE_NUMBERS, DTYPES


class Kind(IntEnum):
    """The collectives."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BROADCAST_OBJECT = 9
    ALL_GATHER_OBJECTS = 10
    SHARED = 11
    COUNTER = 12
    LOCKS = 13
    SPLIT = 14


_ROOTED = (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER, Kind.BROADCAST_OBJECT)
_BARE = (Kind.BARRIER, Kind.ALL_GATHER_OBJECTS, Kind.COUNTER, Kind.SPLIT)


class Call(int):
    """A collective and what its ranks must agree on.

    From the top: kind (5 bits), reduction (4), dtype (6), root or a check sum of the lengths (12), length
    (36, the rest of it is left out).
    """

    @classmethod
    @lru_cache(maxsize=4096)
    def of(
        cls,
        kind: Kind,
        dtype: torch.dtype = torch.uint8,
        length: int = 0,
        *,
        reduction: int = 0,
        root: int = 0,
    ) -> Call:
        """The word for a call."""
        return cls(
            kind << 58
            | reduction << 54
            | DTYPE_NUMBERS[dtype] << 48
            | (root & 0xFFF) << 36
            | length & 0xFFFFFFFFF
        )

    def __str__(self) -> str:
        kind, root = Kind(self >> 58), self >> 36 & 0xFFF
        parts = []
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            parts.append(REDUCTION_NAMES[self >> 54 & 0xF])
        if kind not in _BARE:
            parts.append(f"{self & 0xFFFFFFFFF} x {DTYPES[self >> 48 & 0x3F]}")
        if kind in _ROOTED:
            parts.append(f"root {root}")
        elif root:
            parts.append(f"sizes with check sum {root}")
        return f"{kind.name.lower()}({', '.join(parts)})"


BARRIER: Final = Call(0)
"""What takes the ranks together and nothing else."""


def check_sum(lengths: Sequence[int]) -> int:
    """Of the ranks' lengths, in 12 bits; 0 if all are equal."""
    if min(lengths) == max(lengths):
        return 0
    return zlib.crc32(repr(list(lengths)).encode()) % 0xFFF + 1


def disagreement(rank: int, call: Call, other: int, theirs: Call) -> str:
    """What is wrong when two ranks, numbered in the job, have called different things."""
    return (
        f"rank {rank} called {call} while rank {other} called {theirs}; all ranks of a group must call the "
        "same collectives in the same order, with the same sizes and dtypes"
    )


def agree_on_lengths(table: Sequence[Sequence[int]], names: Sequence[int], mismatch: type[Exception]) -> None:
    """See that in an all_to_all everybody gets what is sent to it; raise a `mismatch` if not.

    Args:
        table: of each rank, how many elements it has for each, and then how many it expects from each.
        names: the ranks' numbers in the job.
        mismatch: the error that somebody expects something else.
    """
    size = len(names)
    for sender in range(size):
        for receiver in range(size):
            sent, expected = table[sender][receiver], table[receiver][size + sender]
            if sent != expected:
                raise mismatch(
                    f"rank {names[sender]} called all_to_all with {sent} elements for rank "
                    f"{names[receiver]}, which called it to receive {expected} from there; give "
                    "splits that agree"
                )
