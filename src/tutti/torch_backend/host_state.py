"""The memory in which the ranks of one host learn what ranks on several hosts do together.

    ┌ claims ────────┬ shorts ────────┬ calls ──────────┬ arrivals ───────┬ result ─────┐
    │ what each rank │ a short vector │ what each rank  │ how far each    │ of all      │
    │ of this host   │ of each rank   │ of all called   │ rank is known   │ short       │
    │ calls          │ of this host   │                 │ to be           │ vectors     │
    └────────────────┴────────────────┴─────────────────┴─────────────────┴─────────────┘

Claims and shorts are written by the ranks themselves, before those of the host meet; all the rest by the
first of them, before they meet again.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tutti.comm.shm.arena import Arena

SHORT: Final = 64 << 10
"""Bytes of the longest vector that travels with the call."""


class Board:
    """A host's board.

    Args:
        arena: the memory that the ranks of this host share.
        place: where in it the board begins, of `board_bytes`.
        local_size: how many ranks this host has.
        size: how many ranks there are in all.

    Attributes:
        claims: what each rank of this host calls.
        calls: what each rank called.
        arrivals: how many collectives each rank is known to have begun.
    """

    def __init__(self, arena: Arena, place: int, local_size: int, size: int) -> None:
        words = arena.words(place, 2 * size + local_size)
        self.calls, self.arrivals, self.claims = words[:size], words[size : 2 * size], words[2 * size :]
        # What is made in inference mode can be written in that mode alone.
        with torch.inference_mode(False):
            memory = arena.tensor(
                place + _words_bytes(local_size, size), (local_size + 1, SHORT), torch.uint8
            )
        self._shorts: list[Tensor] = list(memory[:-1])
        self._result: Tensor = memory[-1]

    def short(self, local_rank: int, like: Tensor) -> Tensor:
        """Where a short vector of a rank of this host is."""
        return self._shorts[local_rank][: like.nbytes].view(like.dtype)

    def result(self, like: Tensor) -> Tensor:
        """Where the short result of all ranks is."""
        return self._result[: like.nbytes].view(like.dtype)


def board_bytes(local_size: int, size: int) -> int:
    """How many bytes of the arena a board needs."""
    return _words_bytes(local_size, size) + (local_size + 1) * SHORT


def _words_bytes(local_size: int, size: int) -> int:
    return 8 * (2 * size + local_size)
