"""The barrier of a host's ranks: shared words, in which each rank announces its call.

Ranks that call different things get an error instead of hanging. Every collective is a generator: it yields
False when it has to wait for another rank, and True when it has moved something. Its caller decides how to
wait.

Phase n of the barrier, as each rank goes through it; only the rank itself writes the words of its line:

    [1] store the data that the others are to read, in one of two sets of rows (`collectives`)
    [2] store its call in its word CALL + n % 2; a plain barrier needs none
    ─── fence ───
    [3] store 2 n, + 1 if it is more than a plain barrier, in its word PHASE + n % 2
    [4] load the words PHASE + n % 2 of the others, until each of them is 2 n or 2 n + 1
    ─── fence ───
    [5] load the others' words CALL + n % 2, and compare
    [6] load the others' data

The order that the phases rest on:

- [1] and [2] are seen before [3], and [4] comes before [5] and [6]: who sees a rank's phase sees its call and
  its data. x86 never reorders two stores, nor two loads (TSO), so that no instruction is needed there, and
  `ORDERED` skips the calls of `fence`; weaker machines, such as Arm, need both fences.
- [6] of phase n comes before [3] of phase n + 1: who sees phase n + 1 may overwrite what was read in phase n.
  x86 keeps a load before the stores that follow it; elsewhere the fence before [3] holds back loads, too.
- Nothing rests on [3] being seen before the rank's own loads in [4], the one order that x86 does not keep: a
  store that stays in the store buffer for a time makes the others wait longer and decides nothing. So no
  MFENCE is needed.

Two sets of words, for even and odd n, suffice. A rank stores in the set of phase n again in phase n + 2,
which it enters after it has seen every rank in phase n + 1, and a rank comes there after its [5] of phase n.
With one set, a rank that is ahead would overwrite its call of phase n before the slow ones have read it. For
the same reason a word in [4] is never further than n: it is the word of phase n - 2 or n.

A word is written and read by one instruction each, as it is aligned and a memoryview of format "q" copies
eight bytes, so that no rank sees half of it. It does not overflow: 2^62 phases of a microsecond are 146,000
years.

Source of the two sets: Mellor-Crummey and Scott 1991, "Algorithms for scalable synchronization on
shared-memory multiprocessors", ACM Transactions on Computer Systems 9 (its barriers use them by parity).
`tests/comm/interleavings.py` runs this code in every order of its loads and stores.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import torch

from tutti.comm.reductions import REDUCTIONS
from tutti.comm.shm.fence import ORDERED, fence
from tutti.comm.shm.layout import CALL, PHASE, HostGroup
from tutti.comm.shm.rings import DTYPE_NUMBERS, DTYPES
from tutti.errors import CallsDiffer


class Collective(IntEnum):
    """The collectives."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    BROADCAST_OBJECT = 8
    ALL_GATHER_OBJECTS = 9
    SHARED = 10
    COUNTER = 11
    LOCKS = 12
    SPLIT = 13


_ROOTED = (Collective.BROADCAST, Collective.GATHER, Collective.SCATTER, Collective.BROADCAST_OBJECT)
_BARE = (Collective.BARRIER, Collective.ALL_GATHER_OBJECTS, Collective.COUNTER, Collective.SPLIT)


class Call(int):
    """A collective and what its ranks must agree on, packed in one word, so that it is compared in one load.

    62  59 58     55 54  49 48  37 36      0
    │ kind │ reduction │ dtype │ root │ length │
    """

    @classmethod
    @lru_cache(maxsize=4096)
    def of(
        cls,
        kind: Collective,
        dtype: torch.dtype = torch.uint8,
        length: int = 0,
        *,
        reduction: int = 0,
        root: int = 0,
    ) -> Call:
        """Return the word for a call."""
        # The top bit stays 0: words are signed.
        number = DTYPE_NUMBERS[dtype]
        return cls(kind << 59 | reduction << 55 | number << 49 | (root & 0xFFF) << 37 | length & 0x1FFFFFFFFF)

    def __str__(self) -> str:
        kind = Collective(self >> 59)
        parts = []
        if kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            parts.append(REDUCTIONS[self >> 55 & 0xF].name)
        if kind not in _BARE:
            parts.append(f"{self & 0x1FFFFFFFFF} x {DTYPES[self >> 49 & 0x3F]}")
        if kind in _ROOTED:
            parts.append(f"root {self >> 37 & 0xFFF}")
        return f"{kind.name.lower()}({', '.join(parts)})"


BARRIER: Final = Call(0)
"""The call of a plain barrier. It is 0, so that `if call` is the test for a call to compare."""


def disagreement(rank: int, call: Call, other: int, theirs: Call) -> str:
    """Return the error message for two ranks, numbered in the job, that have called different things."""
    return (
        f"rank {rank} called {call} while rank {other} called {theirs}; all ranks of a group must call the "
        "same collectives in the same order, with the same sizes and dtypes"
    )


def agree_on_lengths(table: Sequence[Sequence[int]], global_ranks: Sequence[int]) -> None:
    """Raise `CallsDiffer` unless every rank of an all_to_all expects the lengths that are sent to it.

    A row of `table` has a rank's output lengths for each rank, then its input lengths from each.
    """
    size = len(global_ranks)
    for sender in range(size):
        for receiver in range(size):
            sent, expected = table[sender][receiver], table[receiver][size + sender]
            if sent != expected:
                raise CallsDiffer(
                    f"rank {global_ranks[sender]} called all_to_all with {sent} elements for rank "
                    f"{global_ranks[receiver]}, which called it to receive {expected} from there; give "
                    "splits that agree"
                )


Steps = Generator[bool, None, None]

TRIES: Final = 4000
"""The number of times `arrive` looks for the others before it leaves the waiting to its caller."""


class HostBarrier:
    """The barrier of a group's ranks on one host."""

    def __init__(self, group: HostGroup, crowded: bool) -> None:
        self._group, self._words, self.rank, self.size = group, group.words, group.rank, group.size
        rank, layout = group.rank, group.layout
        self._others = tuple((rank + step) % self.size for step in range(1, self.size))
        self._parities = tuple(
            (
                layout.line(rank) + PHASE + turn,
                tuple(layout.line(other) + PHASE + turn for other in self._others),
            )
            for turn in range(2)
        )
        # A rank that spins on its core may keep the rank that it waits for from running.
        self._tries = 0 if crowded else TRIES
        self._set = self._phase = 0

    def absent(self) -> list[int]:
        """Return the ranks that have not reached the phase in which this one waits."""
        phase, words = self._phase, self._words
        _, places = self._parities[phase >> 1 & 1]
        return [other for other, place in zip(self._others, places, strict=True) if words[place] < phase]

    def barrier(self) -> Steps:
        """Wait until every rank has called this."""
        yield from self._arrive_and_wait(BARRIER)

    def arrive(self, call: Call) -> bool:
        """Enter the next phase, and look for the others as long as they must be near.

        Return whether all have arrived with the same call. If not, `wait` must follow.
        """
        # `_phase` is 2 n: the word without its lowest bit. The bit above that one is the parity of n.
        self._phase = phase = self._phase + 2
        own, places = self._parities[phase >> 1 & 1]
        words = self._words
        if call:
            words[own + CALL] = call  # [2]
            phase |= 1
        if not ORDERED:
            fence()
        words[own] = phase  # [3]
        # [4] A rank that called a barrier where this one did not, or the reverse, differs in the lowest bit:
        # it is never found here, and `wait` raises.
        tries = self._tries
        for place in places:
            while words[place] != phase:
                tries -= 1
                if tries < 0:
                    return False
        if not ORDERED:
            fence()
        if call:
            for place in places:
                if words[place + CALL] != call:  # [5]
                    return False
        return True

    def wait(self, call: Call) -> Steps:
        """Wait for the others in this rank's phase, and check that they have called the same."""
        words, phase = self._words, self._phase
        _, places = self._parities[phase >> 1 & 1]
        for place in places:
            while words[place] < phase:  # [4], with the lowest bit or without
                yield False
        if not ORDERED:
            fence()
        for other, place in zip(self._others, places, strict=True):
            theirs = Call(words[place + CALL]) if words[place] & 1 else BARRIER  # [5]
            if theirs != call:
                # Different calls may have left the ranks in different sets of rows. All ranks are here now
                # and find a difference, so that all begin with the same set again, and none reads rows
                # meanwhile.
                self._set = 0
                names = self._group.global_ranks
                raise CallsDiffer(disagreement(names[self.rank], call, names[other], theirs))

    def _arrive_and_wait(self, call: Call) -> Steps:
        """Enter the next phase and wait for all ranks without spinning, in a call that may take long."""
        self._phase = phase = self._phase + 2
        own, _ = self._parities[phase >> 1 & 1]
        words = self._words
        words[own + CALL] = call  # [2]
        if not ORDERED:
            fence()
        words[own] = phase | bool(call)  # [3]
        yield from self.wait(call)
