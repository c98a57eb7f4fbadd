"""The notices that the ranks of an MPI communicator send when they leave it, and its freeing.

    rank 0   ... all_reduce │ leaves: tells the others how many collectives it has done │
    rank 1   ... all_reduce │ all_reduce ─ waits ─ learns that rank 0 has done one less: it will not come

A rank that has left, and has received the notices of all others, knows that nothing is under way any more,
and frees the communicator. No rank waits for that: it is tried when the next communicator begins or ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy

from tutti.comm.shm.liveness import LONGEST_NAP_S

LEAVE_TAG: Final = 32_766
"""The tag of a leave notice; no other message on such a communicator has it."""

PERIOD_S: Final = 0.01
"""How often a waiting rank looks for notices."""

GRACE_S: Final = 0.2
"""How long a message that a rank sent before it left may take to come."""

ANNOUNCE_S: Final = 0.1
"""How long a rank that leaves may take to send its notices."""

_NONE: Final = -1


class LeaveNotices:
    """The leave notices that one rank of an MPI communicator sends and receives.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the communicator.
        others: the ranks with which it exchanges them.

    Attributes:
        comm: the communicator.
    """

    def __init__(self, mpi: Any, comm: Any, others: Sequence[int]) -> None:
        self.comm = comm
        self._mpi, self._others = mpi, tuple(others)
        self._left: dict[int, tuple[int, float]] = {}
        self._lock, self._next_look_s = threading.Lock(), 0.0
        self._requests: list[Any] = []
        self._sent = False

    def early(self, begun: int) -> list[int]:
        """The ranks that have left, and will not come to the latest of `begun` collectives."""
        return [rank for rank, (done, _) in tuple(self._left.items()) if done < begun]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left, and no message from it can still come."""
        return rank in self._left and time.monotonic() > self._left[rank][1] + GRACE_S

    def look(self, failed: Callable[[], list[int]] = list) -> list[int]:
        """Receive the notices that have come, at most every `PERIOD_S`.

        Args:
            failed: tells the ranks that MPI knows to be dead, numbered in the job.

        Returns:
            The lost ranks, numbered in the job: those that ranks have left for, and those that `failed`.
        """
        if time.monotonic() < self._next_look_s:
            return []
        with self._lock:
            self._next_look_s = time.monotonic() + PERIOD_S
            return self.receive() + failed()

    def receive(self) -> list[int]:
        """Receive the notices that have come; return the lost ranks that they name, numbered in the job."""
        lost, status = list[int](), self._mpi.Status()
        while (message := self.comm.Improbe(self._mpi.ANY_SOURCE, LEAVE_TAG, status)) is not None:
            words = numpy.zeros(2, numpy.int64)
            message.Recv(words)
            self._left[status.Get_source()] = int(words[0]), time.monotonic()
            if words[1] != _NONE:
                lost.append(int(words[1]))
        return lost

    def send(self, done: int, lost: Sequence[int] = ()) -> None:
        """Send this rank's notices, once.

        Args:
            done: the number of collectives that it has finished.
            lost: the rank because of which it leaves, numbered in the job, if it has lost one.
        """
        if self._sent:
            return
        self._sent = True
        words = numpy.array([done, lost[0] if lost else _NONE])
        # A request keeps its message alive.
        self._requests = [self.comm.Isend(words, rank, LEAVE_TAG) for rank in self._others]
        deadline = time.monotonic() + ANNOUNCE_S
        while not self._delivered() and time.monotonic() < deadline:
            time.sleep(LONGEST_NAP_S)

    def all_over(self) -> bool:
        """Return whether all have left, and all notices are sent and received."""
        self.receive()
        return len(self._left) == len(self._others) and self._delivered()

    def _delivered(self) -> bool:
        return all(request.Test() for request in self._requests)


_closing: Final[list[tuple[Callable[[], bool], Callable[[], None]]]] = []


def free_later(over: Callable[[], bool], free: Callable[[], None]) -> None:
    """Free a communicator once `over()`, at a later call of `free_what_is_over`."""
    _closing.append((over, free))


def free_what_is_over(errors: type[Exception]) -> None:
    """Free the communicators that all ranks have left; `errors` are MPI's."""
    for one in tuple(_closing):
        over, free = one
        try:
            if over():
                _closing.remove(one)
                free()
        except errors:
            # A rank of it died, and freeing it needs all of them.
            _closing.remove(one)
