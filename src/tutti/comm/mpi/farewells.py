"""What the ranks of an MPI communicator say when they leave it, and when it can be freed.

    rank 0   ... all_reduce │ leaves: tells the others how many collectives it has done │
    rank 1   ... all_reduce │ all_reduce ─ waits ─ hears that rank 0 has done one less: it will not come

A rank that has left, and has heard the same of all others, knows that nothing can be under way any more, and
frees the communicator. Nobody waits for that: it is looked after when the next one begins or ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy

from tutti.comm.shm.liveness import LONGEST_NAP_S

FAREWELL: Final = 32_766
"""The tag of what a rank says when it leaves; no other message on such a communicator has it."""

PERIOD_S: Final = 0.01
"""How often who waits looks for news."""

GRACE_S: Final = 0.2
"""How long what a rank sent before it left may still be on its way."""

LAST_WORDS_S: Final = 0.1
"""How long a rank that leaves may take to tell the others."""

_NOBODY: Final = -1


class Farewells:
    """What one rank of an MPI communicator knows of the others' leaving it.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the communicator.
        others: the ranks that tell this one when they leave, and are told.

    Attributes:
        comm: the communicator.
    """

    def __init__(self, mpi: Any, comm: Any, others: Sequence[int]) -> None:
        self.comm = comm
        self._mpi, self._others = mpi, tuple(others)
        self._left: dict[int, tuple[int, float]] = {}
        self._lock, self._next_look_s = threading.Lock(), 0.0
        self._words: list[Any] = []
        self._said = False

    def early(self, begun: int) -> list[int]:
        """The ranks that have left, and will not come to the latest of `begun` collectives."""
        return [rank for rank, (done, _) in tuple(self._left.items()) if done < begun]

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left, and nothing that it sent can still come."""
        return rank in self._left and time.monotonic() > self._left[rank][1] + GRACE_S

    def look(self, failed: Callable[[], list[int]] = list) -> list[int]:
        """Hear what has come, at most every `PERIOD_S`.

        Args:
            failed: tells whom MPI knows to be dead, numbered in the job.

        Returns:
            Who is lost, numbered in the job: whom ranks have left for, and who has `failed`.
        """
        if time.monotonic() < self._next_look_s:
            return []
        with self._lock:
            self._next_look_s = time.monotonic() + PERIOD_S
            return self.hear() + failed()

    def hear(self) -> list[int]:
        """Hear what has come; whom ranks have left for, numbered in the job."""
        lost, status = list[int](), self._mpi.Status()
        while (message := self.comm.Improbe(self._mpi.ANY_SOURCE, FAREWELL, status)) is not None:
            words = numpy.zeros(2, numpy.int64)
            message.Recv(words)
            self._left[status.Get_source()] = int(words[0]), time.monotonic()
            if words[1] != _NOBODY:
                lost.append(int(words[1]))
        return lost

    def say(self, done: int, lost: Sequence[int] = ()) -> None:
        """Tell the others that this rank leaves; once.

        Args:
            done: how many collectives it has finished.
            lost: whom it leaves for, numbered in the job, if it had lost somebody.
        """
        if self._said:
            return
        self._said = True
        words = numpy.array([done, lost[0] if lost else _NOBODY])
        # A request keeps what it sends.
        self._words = [self.comm.Isend(words, rank, FAREWELL) for rank in self._others]
        deadline = time.monotonic() + LAST_WORDS_S
        while not self._told() and time.monotonic() < deadline:
            time.sleep(LONGEST_NAP_S)

    def all_over(self) -> bool:
        """Whether all have left, and have told and heard so."""
        self.hear()
        return len(self._left) == len(self._others) and self._told()

    def _told(self) -> bool:
        return all(request.Test() for request in self._words)


_closing: Final[list[tuple[Callable[[], bool], Callable[[], None]]]] = []


def free_later(over: Callable[[], bool], free: Callable[[], None]) -> None:
    """Free something as soon as `over()`, at the next `free_what_is_over`."""
    _closing.append((over, free))


def free_what_is_over(errors: type[Exception]) -> None:
    """Free what all ranks have left; `errors` are MPI's."""
    for one in tuple(_closing):
        over, free = one
        try:
            if over():
                _closing.remove(one)
                free()
        except errors:
            # A rank of it died: who would free it with us?
            _closing.remove(one)
