"""What a rank called, in one word: ranks that call different things are told so instead of hanging."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch

from tutti.backend.failures import Mismatch
from tutti.backend.operations import REDUCTION_NAMES
from tutti.comm.rings import DTYPE_NUMBERS, DTYPES


class Kind(IntEnum):
    """The collectives."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE = 3
    REDUCE_SCATTER = 4
    BROADCAST = 5
    ALL_GATHER = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9


_ROOTED = (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)


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
        kind = self >> 58
        if kind not in Kind._value2member_map_:
            return "nothing"
        parts = [f"{self & 0xFFFFFFFFF} x {DTYPES[self >> 48 & 0x3F]}"]
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            parts.insert(0, REDUCTION_NAMES[self >> 54 & 0xF])
        root = self >> 36 & 0xFFF
        if kind in _ROOTED:
            parts.append(f"root {root}")
        elif root:
            parts.append(f"sizes with check sum {root}")
        return "barrier()" if kind == Kind.BARRIER else f"{Kind(kind).name.lower()}({', '.join(parts)})"


def check_sum(lengths: Sequence[int]) -> int:
    """Of the ranks' lengths, in 12 bits; 0 if all are equal."""
    if min(lengths) == max(lengths):
        return 0
    return zlib.crc32(repr(list(lengths)).encode()) % 0xFFF + 1


def disagreement(rank: int, call: Call, other: int, theirs: Call) -> Mismatch:
    """The error that two ranks, numbered in the job, have called different things."""
    return Mismatch(
        f"rank {rank} called {call} while rank {other} called {theirs}; all ranks of a group must call the "
        "same collectives in the same order, with the same sizes and dtypes"
    )


def agree_on_lengths(table: Sequence[Sequence[int]], names: Sequence[int]) -> None:
    """See that in an all_to_all everybody gets what is sent to it.

    Args:
        table: of each rank, how many elements it has for each, and then how many it expects from each.
        names: the ranks' numbers in the job.

    Raises:
        Mismatch: somebody expects something else.
    """
    size = len(names)
    for sender in range(size):
        for receiver in range(size):
            sent, expected = table[sender][receiver], table[receiver][size + sender]
            if sent != expected:
                raise Mismatch(
                    f"rank {names[sender]} called all_to_all with {sent} elements for rank "
                    f"{names[receiver]}, which called it to receive {expected} from there; give "
                    "splits that agree"
                )
