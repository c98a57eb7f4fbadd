"""The state that all MPI communicators of a process share: waiting, leaving, and the failures of ranks."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

import numpy

from tutti.comm.mpi.group import failed_ranks, wait_for_names
from tutti.comm.mpi.leave_notices import LeaveNotices, free_later, free_what_is_over
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.liveness import LEFT_EARLY, LONGEST_NAP_S, NAP_SHARE, SHORTEST_NAP_S
from tutti.errors import PeerLost

SPIN_S: Final = 50e-6
CHECK_AFTER_S: Final = 0.01
SLOWEST_BYTES_PER_S: Final = 1e8
"""While a transfer may still go on at this speed, naps stay short: MPI moves data only when it is called."""

DEATH_TAG: Final = 32_767
"""The tag, on MPI's own world, of a message that names a dead rank; no other message uses it."""


class MpiJob:
    """One process's view of the ranks that MPI started.

    Args:
        mpi: the module `mpi4py.MPI`.
        node: the ranks of this host.
        ulfm: whether the library can go on after a rank died.

    Attributes:
        members: this rank's part in each of the MPI communicators in use.
        revoked: whether a rank was lost.
    """

    def __init__(self, mpi: Any, node: HostCommunicator, ulfm: bool) -> None:
        self.mpi, self.node = mpi, node
        self.members: list[Membership] = []
        self.revoked = False
        self._notes: list[Any] = []
        self._ulfm = ulfm
        self._next_look_s = 0.0

    def adopt(self, comm: Any) -> Membership:
        """Take an MPI communicator into use."""
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.members.append(member := Membership(self, comm))
        free_what_is_over(self.mpi.Exception)
        return member

    def drop(self, member: Membership) -> None:
        """Leave an MPI communicator; it is freed when all have."""
        if member in self.members:
            self.members.remove(member)
            member.leave()
            # Freeing needs the others, and they may be gone.
            if not self.revoked:
                free_later(member.leave_notices.all_over, member.comm.Free)
                free_what_is_over(self.mpi.Exception)

    def leave(self) -> None:
        """Leave all MPI communicators: the ranks of other hosts that still wait for this one are told."""
        if not self.mpi.Is_finalized():
            for member in tuple(self.members):
                member.leave()

    def give_up(self, lost: Sequence[int]) -> None:
        """Name a lost rank to all others; every operation on its communicators fails, in all ranks."""
        if self.revoked:
            return
        self.revoked = True
        world = self.mpi.COMM_WORLD
        if lost:
            self.node._peers.report(lost[0])
            for rank in {*range(world.Get_size())} - {*lost, *self.node._peers.group.global_ranks}:
                self._tell(rank, lost[0])
        if self._ulfm:
            for member in self.members:
                if not member.comm.Is_revoked():
                    member.comm.Revoke()

    def _tell(self, rank: int, lost: int) -> None:
        try:
            # A message this short is on its way when this returns; nobody waits for it.
            self._notes.append(self.mpi.COMM_WORLD.Isend(numpy.array([lost]), rank, DEATH_TAG))
        except self.mpi.Exception as error:
            # That rank may be dead too; the others are still to be told.
            if not self._means_death(error):
                raise

    def _means_death(self, error: Exception) -> bool:
        mpi, kind = self.mpi, cast("Any", error).Get_error_class()
        if not self._ulfm:
            return False
        if kind == mpi.ERR_OTHER:
            # A collective that was under way reports only this.
            return (
                any(member.comm.Is_revoked() for member in self.members)
                or mpi.COMM_WORLD.Get_failed().size > 0
            )
        return kind in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)

    def explained(self, error: Exception) -> Exception:
        """`PeerLost`, if an MPI exception means that; else the exception itself."""
        if not self._means_death(error):
            return error
        lost = wait_for_names(self._dead)
        self.give_up(lost)
        return PeerLost(lost, "on another host" if lost else "a rank of another host gave up")

    def _dead(self) -> list[int]:
        """The ranks, numbered in the job, that MPI or another rank has reported dead."""
        world, mpi = self.mpi.COMM_WORLD, self.mpi
        ranks = failed_ranks(world)
        try:
            if not ranks and world.Iprobe(mpi.ANY_SOURCE, DEATH_TAG):
                name = numpy.zeros(1, numpy.int64)
                world.Recv(name, mpi.ANY_SOURCE, DEATH_TAG)
                ranks = [int(name[0])]
        except mpi.Exception as error:
            # Just now MPI has noticed a death, which `Get_failed` will name.
            if not self._means_death(error):
                raise
        return ranks

    def look(self) -> None:
        """Notice dead ranks of this host, at most every `CHECK_AFTER_S`: for callers that do not wait."""
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + CHECK_AFTER_S
            self.node._peers.check()

    def wait(
        self, ready: Callable[[], bool], nbytes: int = 0, gone: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """Wait until `ready()`, with naps once that takes long; notice dead ranks of this host.

        Args:
            ready: the condition.
            nbytes: the bytes that are moved meanwhile.
            gone: tells the ranks, numbered in the job, that are needed and have left.

        Raises:
            PeerLost: a rank of this host died, or ranks are gone.
        """
        started, flowing_s = time.monotonic(), nbytes / SLOWEST_BYTES_PER_S
        while not ready():
            waited_s = time.monotonic() - started
            if waited_s < SPIN_S:
                os.sched_yield()
                continue
            nap_s = NAP_SHARE * max(0.0, waited_s - flowing_s)
            time.sleep(min(max(nap_s, SHORTEST_NAP_S), LONGEST_NAP_S))
            if waited_s > CHECK_AFTER_S:
                self.node._peers.check()
                if (left := gone()) and not ready():
                    raise PeerLost(left, LEFT_EARLY)


class Membership:
    """A rank's membership of an MPI communicator: its collectives and messages with others, which may leave.

    Args:
        job: the job's state.
        comm: the communicator.
    """

    def __init__(self, job: MpiJob, comm: Any) -> None:
        self.comm, self._job = comm, job
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self.leave_notices = LeaveNotices(
            job.mpi, comm, [rank for rank in range(self._size) if rank != self._rank]
        )
        self._begun = self._done = 0

    def together(self, request: Any, nbytes: int = 0) -> None:
        """Wait for the next collective, of all ranks, which moves `nbytes`."""
        self._begun += 1
        self._job.wait(request.Test, nbytes, lambda: self._named(self._left_early()))
        self._done = self._begun

    def complete(self, request: Any, rank: int, nbytes: int = 0) -> None:
        """Wait for a message to or from another rank, which moves `nbytes`."""
        self.wait(request.Test, rank, nbytes)

    def wait(self, ready: Callable[[], bool], rank: int, nbytes: int = 0) -> None:
        """Wait for a condition that needs another rank, or, if `rank` is negative, any other."""
        needed = [rank] if rank >= 0 else [other for other in range(self._size) if other != self._rank]
        self._job.wait(ready, nbytes, lambda: self._named(self._gone(needed)))

    def leave(self) -> None:
        """Tell the others that this rank has left."""
        try:
            self.leave_notices.send(self._done)
        except self._job.mpi.Exception:
            # A rank is dead, and MPI tells the others.
            return

    def _left_early(self) -> list[int]:
        self.leave_notices.look()
        return self.leave_notices.early(self._begun)

    def _gone(self, needed: Sequence[int]) -> Sequence[int]:
        """Return the ranks, if all of them have left."""
        self.leave_notices.look()
        return needed if needed and all(map(self.leave_notices.has_left, needed)) else ()

    def _named(self, ranks: Sequence[int]) -> list[int]:
        """The ranks' numbers in the job."""
        if not ranks:
            return []
        group, everyone = self.comm.Get_group(), self._job.mpi.COMM_WORLD.Get_group()
        return [int(name) for name in group.Translate_ranks(ranks, everyone)]


class InJob(Protocol):
    """An object that belongs to a job."""

    _job: MpiJob


S = TypeVar("S", bound=InJob)
P = ParamSpec("P")
R = TypeVar("R")


def guarded(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Turn MPI's errors about dead ranks into `PeerLost`; tell the other hosts of every `PeerLost`."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(self, *args, **kwargs)
        except PeerLost as error:
            self._job.give_up(error.ranks)
            raise
        except self._job.mpi.Exception as error:
            explained = self._job.explained(error)
            if explained is error:
                raise
            raise explained from error

    return cast("Callable[Concatenate[S, P], R]", functools.wraps(operation)(call))
