"""The memory in which the ranks of one host learn of the collectives of ranks on several hosts.

    ┌ claims ────────┬ shorts ────────┬ calls ──────────┬ arrivals ───────┬ result ─────┐
    │ what each rank │ a short vector │ what each rank  │ how far each    │ of all      │
    │ of this host   │ of each rank   │ of all called   │ rank is known   │ short       │
    │ calls          │ of this host   │                 │ to be           │ vectors     │
    └────────────────┴────────────────┴─────────────────┴─────────────────┴─────────────┘

Claims and shorts are written by the ranks themselves, before the barrier of their host; all the rest by the
first of them, before the next such barrier.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tutti.comm.shm.arena import Arena

SHORT_BYTES: Final = 64 << 10
"""The most bytes of a vector that travels with the call."""


class HostState:
    """The state of a group's collectives in the memory of one host.

    Args:
        arena: the memory that the ranks of this host share.
        place: the offset in it of the state, which has `host_state_bytes`.
        local_size: the number of ranks of this host.
        size: the number of ranks in all.

    Attributes:
        claims: the call of each rank of this host.
        calls: the call of each rank of the group.
        arrivals: the number of collectives that each rank is known to have begun.
    """

    def __init__(self, arena: Arena, place: int, local_size: int, size: int) -> None:
        words = arena.words(place, 2 * size + local_size)
        self.calls, self.arrivals, self.claims = words[:size], words[size : 2 * size], words[2 * size :]
        # Tensors that are made in inference mode can be written only in that mode.
        with torch.inference_mode(False):
            memory = arena.tensor(
                place + _words_bytes(local_size, size), (local_size + 1, SHORT_BYTES), torch.uint8
            )
        self._shorts: list[Tensor] = list(memory[:-1])
        self._result: Tensor = memory[-1]

    def short(self, local_rank: int, like: Tensor) -> Tensor:
        """The place of a short vector of a rank of this host."""
        return self._shorts[local_rank][: like.nbytes].view(like.dtype)

    def result(self, like: Tensor) -> Tensor:
        """The place of the short result of all ranks."""
        return self._result[: like.nbytes].view(like.dtype)


def host_state_bytes(local_size: int, size: int) -> int:
    """The number of bytes of the arena that the state needs."""
    return _words_bytes(local_size, size) + (local_size + 1) * SHORT_BYTES


def _words_bytes(local_size: int, size: int) -> int:
    return 8 * (2 * size + local_size)
