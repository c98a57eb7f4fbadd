"""How the ranks of a host wait for each other: in shared words, each saying what it calls.

Every collective is a generator: it yields False when it has to wait for somebody, and True when it has moved
something. Whoever runs it decides how to wait.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tutti.backend.calls import Call, Kind, disagreement
from tutti.comm.control import CALLS, EPOCH, Layout
from tutti.comm.fence import ORDERED, fence

Steps = Generator[bool, None, None]


class RollCall:
    """The barrier of a group's ranks on one host.

    Args:
        words: the control words.
        rank: this process's number in the group.
        names: what the group's ranks are called in errors: their numbers in the job.
    """

    def __init__(self, words: memoryview, rank: int, names: Sequence[int]) -> None:
        self.rank, self.size, self._names = rank, len(names), tuple(names)
        layout = Layout(self.size)
        self._words, self._own = words, layout.line(rank)
        others = [(rank + step) % self.size for step in range(1, self.size)]
        self._others = tuple((other, layout.line(other)) for other in others)
        self._set = self._epoch = 0

    @property
    def absent(self) -> list[int]:
        """The ranks that have not come where this one waits."""
        return [other for other, line in self._others if self._words[line + EPOCH] < self._epoch]

    def barrier(self) -> Steps:
        """Wait until every rank has come here."""
        yield from self._meet(Call.of(Kind.BARRIER))

    def _meet(self, call: Call) -> Steps:
        """Wait for all ranks, and see that they have called the same."""
        words = self._words
        self._epoch = epoch = self._epoch + 1
        words[self._own + CALLS + (epoch & 1)] = call
        if not ORDERED:
            fence()
        words[self._own] = epoch
        yield from self._arrive()
        self._agree(call)

    def _arrive(self) -> Steps:
        """Wait for the others where this rank waits."""
        words, epoch = self._words, self._epoch
        for _, line in self._others:
            while words[line] < epoch:
                yield False

    def _agree(self, call: Call) -> None:
        """See that the others have called the same."""
        if not ORDERED:
            fence()
        words, place = self._words, CALLS + (self._epoch & 1)
        for other, line in self._others:
            if words[line + place] != call:
                self._complain(call, other, Call(words[line + place]))

    def _complain(self, call: Call, other: int, theirs: Call) -> None:
        # Different calls may have left the ranks in different sets. All ranks are here now.
        self._set = 0
        raise disagreement(self._names[self.rank], call, self._names[other], theirs)
