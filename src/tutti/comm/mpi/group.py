"""A group of MPI's ranks: its communicators, the notices of ranks that leave or lose another, and its end.

    rank 0   ... all_reduce │ leaves: sends the others its number of finished collectives │
    rank 1   ... all_reduce │ all_reduce ─ waits ─ learns that rank 0 has done one less: it will not come

A rank that leaves because it has lost another names that one in its notices. A rank that waits for
another has a group in common with it, and looks for its notices: so a loss spreads from rank to rank.

Communicators are never freed: that would need all ranks of the group, and a process has few of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy

from tutti.comm.mpi.library import load
from tutti.comm.shm.liveness import LONGEST_NAP_S, Peers

LEAVE_TAG: Final = 32_766
"""The tag of a leave notice; no other message on a communicator for collectives has it."""

PERIOD_S: Final = 0.01
"""A waiting rank's pause between two looks for notices."""

GRACE_S: Final = 0.2
"""The time for a message to arrive that a rank sent before it left."""

ANNOUNCE_S: Final = 0.1
"""The time for a rank that leaves to send its notices."""

_NONE: Final = -1


class MpiGroup:
    """Two MPI communicators of some ranks of the job, with the names of MPI that their users need.

    Making one is collective over these ranks, and initialises MPI.
    """

    def __init__(self, ranks: Sequence[int], tag: int) -> None:
        mpi = load()
        self.module, world = mpi, mpi.COMM_WORLD
        group = world.Get_group().Incl(list(ranks))
        self.collectives, self.messages = (world.Create_group(group, 2 * tag + which) for which in range(2))
        for comm in (self.collectives, self.messages):
            comm.Set_errhandler(mpi.ERRORS_RETURN)
        group.Free()
        self.byte, self.any_source, self.status = mpi.BYTE, mpi.ANY_SOURCE, mpi.Status
        self.largest_tag = cast("int", world.Get_attr(mpi.TAG_UB))


class Membership:
    """A rank's membership of a group: its notices to the others at its end, and theirs."""

    def __init__(self, mpi: MpiGroup, rank: int, global_ranks: Sequence[int], peers: Peers) -> None:
        self.mpi, self.rank, self.global_ranks = mpi, rank, tuple(global_ranks)
        self.begun = self.done = 0  # collectives of this rank
        self._others = [other for other in range(len(global_ranks)) if other != rank]
        self._peers = peers
        self._left: dict[int, tuple[int, float]] = {}
        self._lock, self._next_look_s = threading.Lock(), 0.0
        self._sent = False

    def early(self) -> list[int]:
        """Return the ranks that have left, and will not come to the latest collective."""
        self.check()
        return [rank for rank, (done, _) in tuple(self._left.items()) if done < self.begun]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left, and no message from it can still come; raises as `early`."""
        self.check()
        return rank in self._left and time.monotonic() > self._left[rank][1] + GRACE_S

    def check(self) -> None:
        """Receive the notices that have come, at most every `PERIOD_S`; raise PeerLost if a rank is lost."""
        if time.monotonic() < self._next_look_s:
            return
        with self._lock:
            self._next_look_s = time.monotonic() + PERIOD_S
            lost = self._receive()
        if lost:
            self._peers.report(lost[0])
            self._peers.check()

    def _receive(self) -> list[int]:
        """Receive the notices that have come; return the lost ranks that they name, numbered in the job."""
        lost, status, comm = list[int](), self.mpi.status(), self.mpi.collectives
        while (message := comm.Improbe(self.mpi.any_source, LEAVE_TAG, status)) is not None:
            words = numpy.zeros(2, numpy.int64)
            message.Recv(words)
            done, dead = words.tolist()
            self._left[status.Get_source()] = done, time.monotonic()
            if dead != _NONE:
                lost.append(dead)
        return lost

    def abandon(self, requests: Sequence[Any]) -> None:
        """Keep requests under way, and their memory, although no rank waits for them now."""
        _unfinished.extend(requests)

    def leave(self, lost: Sequence[int] = ()) -> None:
        """Send the others, once, the notice that this rank leaves."""
        if self._sent or self.mpi.module.Is_finalized():
            return
        self._sent = True
        words = numpy.array([self.done, lost[0] if lost else _NONE])
        # A request keeps its message alive.
        notices = [self.mpi.collectives.Isend(words, rank, LEAVE_TAG) for rank in self._others]
        self.abandon(notices)
        deadline = time.monotonic() + ANNOUNCE_S
        while not all(request.Test() for request in notices) and time.monotonic() < deadline:
            time.sleep(LONGEST_NAP_S)


_unfinished: Final[list[Any]] = []
"""Requests that no rank waits for any more."""
