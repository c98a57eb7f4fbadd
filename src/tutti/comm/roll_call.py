"""How the ranks of a host wait for each other: in shared words, each saying what it calls.

Every collective is a generator: it yields False when it has to wait for somebody, and True when it has moved
something. Whoever runs it decides how to wait.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from tutti.comm.calls import BARRIER, Call, disagreement
from tutti.comm.control import CALLS, MEETING, Layout
from tutti.comm.fence import ORDERED, fence

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
        self._words, layout = words, Layout(self.size)
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
