"""What a rank called, in one word: ranks that call different things are told so instead of hanging."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import torch

from tutti.comm.rings import DTYPE_NUMBERS, DTYPES


class Operation(IntEnum):
    """The collectives."""

    BROADCAST = 1
    ALL_REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    BROADCAST_OBJECT = 5
    ALL_GATHER_OBJECTS = 6
    SHARED = 7
    COUNTER = 8
    LOCK = 9
    SPLIT = 10


class Signature(int):
    """A collective and what its ranks must agree on.

    From the top: operation (5 bits), dtype (8), root (14), length (36, the rest of it is left out).
    """

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, operation: Operation, dtype: torch.dtype, length: int, root: int = 0) -> Signature:
        """The word for a call."""
        return cls(operation << 58 | DTYPE_NUMBERS[dtype] << 50 | root << 36 | length & 0xFFFFFFFFF)

    def __str__(self) -> str:
        operation, dtype = self >> 58, self >> 50 & 0xFF
        if not operation:
            return "barrier"
        name = Operation(operation).name.lower()
        return f"{name}({self & 0xFFFFFFFFF} x {DTYPES[dtype]}, root {self >> 36 & 0x3FFF})"
