"""The barrier of a host's ranks: shared words, in which each rank says what it calls.

Ranks that call different things are told so instead of hanging. Every collective is a generator: it yields
False when it has to wait for somebody, and True when it has moved something. Whoever runs it decides how to
wait.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import torch

from tutti.comm.reductions import REDUCTION_NAMES
from tutti.comm.shm.fence import ORDERED, fence
from tutti.comm.shm.layout import CALLS, MEETING, ControlLayout
from tutti.comm.shm.rings import DTYPE_NUMBERS, DTYPES


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


Steps = Generator[bool, None, None]

TRIES: Final = 4000
"""How often a short call asks for the others before it is left to whoever waits."""


class RollCall:
    """The barrier of a group's ranks on one host.

    Args:
        words: the control words.
        rank: this process's number in the group.
        names: what the group's ranks are called in errors: their numbers in the job.
        crowded: whether the ranks outnumber the cores: then nobody waits without letting go of its core.
        mismatch: the error that the ranks have called different things.
    """

    def __init__(
        self,
        words: memoryview,
        rank: int,
        names: Sequence[int],
        crowded: bool,
        mismatch: type[Exception] = ValueError,
    ) -> None:
        self.rank, self.size, self._names = rank, len(names), tuple(names)
        self._words, layout = words, ControlLayout(self.size)
        self._others = tuple((rank + step) % self.size for step in range(1, self.size))
        self._turns = tuple(
            (
                layout.line(rank) + MEETING + turn,
                tuple(layout.line(other) + MEETING + turn for other in self._others),
            )
            for turn in range(2)
        )
        self._tries, self._mismatch = 0 if crowded else TRIES, mismatch
        self._set = self._meeting = 0

    def absent(self) -> list[int]:
        """The ranks that have not come where this one waits."""
        meeting, words = self._meeting, self._words
        _, places = self._turns[meeting >> 1 & 1]
        return [other for other, place in zip(self._others, places, strict=True) if words[place] < meeting]

    def barrier(self) -> Steps:
        """Wait until every rank has come here."""
        yield from self._meet(BARRIER)

    def knock(self, call: Call) -> bool:
        """Come to a meeting, and ask for the others as long as they must be near.

        Returns:
            Whether all have come and called the same. If not, `linger` is to follow.
        """
        self._meeting = meeting = self._meeting + 2
        own, places = self._turns[meeting >> 1 & 1]
        words = self._words
        if call:
            words[own + CALLS] = call
            meeting |= 1
        if not ORDERED:
            fence()
        words[own] = meeting
        tries = self._tries
        for place in places:
            while words[place] != meeting:
                tries -= 1
                if tries < 0:
                    return False
        if not ORDERED:
            fence()
        if call:
            for place in places:
                if words[place + CALLS] != call:
                    return False
        return True

    def linger(self, call: Call) -> Steps:
        """Wait for the others where this rank waits, and see that they have called the same."""
        words, meeting = self._words, self._meeting
        _, places = self._turns[meeting >> 1 & 1]
        for place in places:
            while words[place] < meeting:
                yield False
        if not ORDERED:
            fence()
        for other, place in zip(self._others, places, strict=True):
            theirs = Call(words[place + CALLS]) if words[place] & 1 else BARRIER
            if theirs != call:
                # Different calls may have left the ranks in different sets. All ranks are here now.
                self._set = 0
                raise self._mismatch(disagreement(self._names[self.rank], call, self._names[other], theirs))

    def _meet(self, call: Call) -> Steps:
        """Wait for all ranks, and see that they have called the same."""
        self._meeting = meeting = self._meeting + 2
        own, _ = self._turns[meeting >> 1 & 1]
        words = self._words
        words[own + CALLS] = call
        if not ORDERED:
            fence()
        words[own] = meeting | bool(call)
        yield from self.linger(call)
