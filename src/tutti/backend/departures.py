"""Who has left a group whose ranks are on several hosts, and when its MPI communicators can be freed.

    rank 0   ... all_reduce │ leaves: tells the others how many collectives it has done │
    rank 1   ... all_reduce │ all_reduce ─ waits ─ hears that rank 0 has done one less: it will not come

A rank that has left, and has heard the same of all others, knows that nothing can be under way any more, and
frees the communicators. Nobody waits for that: it is looked after when the next group begins or ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy

from tutti.backend.failures import RankLost
from tutti.comm.mpi_group import MpiGroup
from tutti.comm.waiting import LONGEST_NAP_S

_FAREWELLS: Final = 2
"""The tag, on the communicator for collectives, of what a rank says when it leaves."""

PERIOD_S: Final = 0.01
"""How often who waits looks for news."""

GRACE_S: Final = 0.2
"""How long what a rank sent before it left may still be on its way."""

LAST_WORDS_S: Final = 0.1
"""How long a rank that leaves may take to tell the others."""

TOLD_WITHIN_S: Final = 1.0
"""How long to wait for MPI to say who died, when all it said is that somebody did."""

_NOBODY: Final = -1
_closing: Final[list[Departures]] = []


class Departures:
    """What one rank of a group knows of the others' leaving.

    Args:
        mpi: the group's MPI communicators.
        names: the ranks' numbers in the job.
        elsewhere: the ranks on other hosts.
        all_here_left: whether all ranks of this host have left.
        report: tells the ranks of this host that a rank, numbered in the job, is lost.
    """

    def __init__(
        self,
        mpi: MpiGroup,
        names: Sequence[int],
        elsewhere: Sequence[int],
        all_here_left: Callable[[], bool],
        report: Callable[[int], None],
    ) -> None:
        self._mpi, self._names, self._elsewhere = mpi, tuple(names), tuple(elsewhere)
        self._all_here_left, self._report = all_here_left, report
        self._left: dict[int, tuple[int, float]] = {}
        self._lock, self._next_look_s = threading.Lock(), 0.0
        self._words: list[Any] = []
        self._abandoned: list[Any] = []
        free_what_all_have_left()

    def early(self, begun: int) -> list[int]:
        """The ranks of other hosts that have left, and will not come to the latest of `begun` collectives."""
        self._look()
        return [rank for rank, (done, _) in tuple(self._left.items()) if done < begun]

    def has_left(self, rank: int) -> bool:
        """Whether a rank of another host has left, and nothing that it sent can still come."""
        self._look()
        return rank in self._left and time.monotonic() > self._left[rank][1] + GRACE_S

    def _look(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        with self._lock:
            self._next_look_s = time.monotonic() + PERIOD_S
            try:
                self._hear()
                lost = [self._names[rank] for rank in self._mpi.failed()]
            except self._mpi.error as error:
                raise self.explained(error) from error
        for name in lost[:1]:
            self._report(name)

    def _hear(self) -> None:
        comm, status = self._mpi.collectives, self._mpi.status()
        while (message := comm.Improbe(self._mpi.any_source, _FAREWELLS, status)) is not None:
            words = numpy.zeros(2, numpy.int64)
            message.Recv(words)
            self._left[status.Get_source()] = int(words[0]), time.monotonic()
            if words[1] != _NOBODY:
                self._report(int(words[1]))

    def explained(self, error: Exception) -> RankLost:
        """What an error of MPI's means."""
        deadline = time.monotonic() + TOLD_WITHIN_S
        while not (lost := self._mpi.failed()) and time.monotonic() < deadline and self._mpi.ulfm:
            time.sleep(LONGEST_NAP_S)
        for rank in lost[:1]:
            self._report(self._names[rank])
        return RankLost([self._names[rank] for rank in lost], f"MPI says: {error}")

    def abandon(self, requests: Sequence[Any]) -> None:
        """Keep what is under way, and its memory, although nobody waits for it any more."""
        self._abandoned += requests

    def leave(self, done: int, lost: Sequence[int]) -> None:
        """Tell the ranks of other hosts that this one leaves.

        Args:
            done: how many collectives it has finished.
            lost: whom it leaves for, numbered in the job, if it had lost somebody.
        """
        words = numpy.array([done, lost[0] if lost else _NOBODY])
        try:
            told = [self._mpi.collectives.Isend(words, rank, _FAREWELLS) for rank in self._elsewhere]
            deadline = time.monotonic() + LAST_WORDS_S
            while (told := [one for one in told if not one.Test()]) and time.monotonic() < deadline:
                time.sleep(LONGEST_NAP_S)
        except self._mpi.error:
            # Somebody is dead, and MPI tells the others.
            return
        self._words = told
        _closing.append(self)
        free_what_all_have_left()

    def _over(self) -> bool:
        """Whether all ranks have left, and nothing is under way."""
        self._hear()
        return (
            len(self._left) == len(self._elsewhere)
            and self._all_here_left()
            and all(request.Test() for request in (*self._words, *self._abandoned))
        )


def free_what_all_have_left() -> None:
    """Free the MPI communicators of groups that all ranks have left."""
    for one in tuple(_closing):
        try:
            if one._over():
                _closing.remove(one)
                one._mpi.free()
        except one._mpi.error:
            # A rank of it died: who would free them with us?
            _closing.remove(one)
