"""What all MPI communicators of a process have in common: how they wait, and what they make of dead ranks."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

import numpy

from tutti.comm.host import HostCommunicator
from tutti.comm.waiting import LONGEST_NAP_S, NAP_SHARE, SHORTEST_NAP_S
from tutti.errors import PeerLost

SPIN_S: Final = 50e-6
CHECK_AFTER_S: Final = 0.01
SLOWEST_BYTES_PER_S: Final = 1e8
"""While a transfer may still go on at this speed, naps stay short: MPI moves data only when it is called."""

OBITUARY: Final = 32_767
"""The tag, on MPI's own world, of a message that says who died; no other message uses that communicator."""

TOLD_WITHIN_S: Final = 1.0
"""How long to wait for MPI to say who died, when all it said is that somebody did."""


class MpiJob:
    """One process's view of the ranks that MPI started.

    Args:
        mpi: the module `mpi4py.MPI`.
        node: the ranks of this host.
        ulfm: whether the library can go on after a rank died.

    Attributes:
        comms: the MPI communicators in use.
        revoked: whether a rank was lost.
    """

    def __init__(self, mpi: Any, node: HostCommunicator, ulfm: bool) -> None:
        self.mpi, self.node = mpi, node
        self.comms: list[Any] = []
        self.revoked = False
        self._notes: list[Any] = []
        self._ulfm = ulfm
        self._next_look_s = 0.0

    def adopt(self, comm: Any) -> None:
        """Take an MPI communicator into use."""
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.comms.append(comm)

    def drop(self, comm: Any) -> None:
        """Give an MPI communicator back (collective)."""
        if comm in self.comms:
            self.comms.remove(comm)
            # Freeing needs the others, and they may be gone.
            if not self.revoked:
                comm.Free()

    def give_up(self, lost: Sequence[int]) -> None:
        """Tell everyone whom this rank lost; every operation on its communicators fails, in all ranks."""
        if self.revoked:
            return
        self.revoked = True
        world = self.mpi.COMM_WORLD
        if lost:
            self.node._peers.report(lost[0])
            for rank in {*range(world.Get_size())} - {*lost, *self.node._peers.names}:
                self._tell(rank, lost[0])
        if self._ulfm:
            for comm in self.comms:
                if not comm.Is_revoked():
                    comm.Revoke()

    def _tell(self, rank: int, lost: int) -> None:
        try:
            # So short a message is on its way when this returns; nobody waits for it.
            self._notes.append(self.mpi.COMM_WORLD.Isend(numpy.array([lost]), rank, OBITUARY))
        except self.mpi.Exception as error:
            # That one may be dead too; all the others are still to be told.
            if not self._means_death(error):
                raise

    def _means_death(self, error: Exception) -> bool:
        mpi, kind = self.mpi, cast("Any", error).Get_error_class()
        if not self._ulfm:
            return False
        if kind == mpi.ERR_OTHER:
            # All that a collective says that was under way just then.
            return any(comm.Is_revoked() for comm in self.comms) or mpi.COMM_WORLD.Get_failed().size > 0
        return kind in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)

    def explained(self, error: Exception) -> Exception:
        """`PeerLost`, if an MPI exception means that; else the exception itself."""
        if not self._means_death(error):
            return error
        deadline = time.monotonic() + TOLD_WITHIN_S
        lost = self._dead()
        while not lost and time.monotonic() < deadline:
            time.sleep(LONGEST_NAP_S)
            lost = self._dead()
        self.give_up(lost)
        return PeerLost(lost, "on another host" if lost else "a rank of another host gave up")

    def _dead(self) -> list[int]:
        """Who is dead, as far as MPI and the other ranks have told, numbered in the job."""
        world, mpi = self.mpi.COMM_WORLD, self.mpi
        failed = world.Get_failed()
        ranks = [int(rank) for rank in failed.Translate_ranks(range(failed.size), world.Get_group())]
        try:
            if not ranks and world.Iprobe(mpi.ANY_SOURCE, OBITUARY):
                name = numpy.zeros(1, numpy.int64)
                world.Recv(name, mpi.ANY_SOURCE, OBITUARY)
                ranks = [int(name[0])]
        except mpi.Exception as error:
            # Just now MPI has noticed a death, which `Get_failed` will name.
            if not self._means_death(error):
                raise
        return ranks

    def look(self) -> None:
        """Notice dead ranks of this host, at most every `CHECK_AFTER_S`: for who asks MPI without waiting."""
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + CHECK_AFTER_S
            self.node._peers.check()

    def complete(self, request: Any, nbytes: int = 0) -> None:
        """Wait for an MPI request that moves `nbytes`."""
        self.wait(request.Test, nbytes)

    def wait(self, ready: Callable[[], bool], nbytes: int = 0) -> None:
        """Return when `ready()`; costs little while that takes long, and notices dead ranks of this host."""
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


class InJob(Protocol):
    """Anything that belongs to a job."""

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
