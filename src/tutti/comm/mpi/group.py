"""MPI communicators for some ranks of the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from tutti.comm.shm.liveness import LONGEST_NAP_S

TOLD_WITHIN_S: Final = 1.0
"""How long to wait until MPI says which rank died, when all it said is that one did."""


def failed_ranks(comm: Any) -> list[int]:
    """The ranks of a communicator that MPI knows to be dead; only with ULFM."""
    dead = comm.Get_failed()
    found = dead.Translate_ranks(range(dead.size), comm.Get_group()) if dead.size else []
    dead.Free()
    return [int(rank) for rank in found]


def wait_for_names(dead: Callable[[], list[int]]) -> list[int]:
    """Wait until MPI, which has just reported a death, names the `dead`; none if it does not soon."""
    deadline = time.monotonic() + TOLD_WITHIN_S
    while not (found := dead()) and time.monotonic() < deadline:
        time.sleep(LONGEST_NAP_S)
    return found


class MpiGroup:
    """Two MPI communicators of some ranks of the job, with the names of MPI that their users need.

    Making one is collective over these ranks.

    Args:
        mpi: the module `mpi4py.MPI`.
        ranks: their numbers in MPI's world, in the order of their new numbers.
        tag: distinguishes groups that are made at the same time.
        ulfm: whether the library can go on after a rank died.

    Attributes:
        module: the module `mpi4py.MPI`.
        collectives: the one for collectives.
        messages: the one for messages between two ranks.
        ulfm: whether the library can go on after a rank died.
    """

    def __init__(self, mpi: Any, ranks: Sequence[int], tag: int, ulfm: bool) -> None:
        self.module, world = mpi, mpi.COMM_WORLD
        group = world.Get_group().Incl(list(ranks))
        self.collectives, self.messages = (world.Create_group(group, 2 * tag + which) for which in range(2))
        for comm in (self.collectives, self.messages):
            comm.Set_errhandler(mpi.ERRORS_RETURN)
        group.Free()
        self.error, self.byte, self.any_source, self.status = (
            mpi.Exception,
            mpi.BYTE,
            mpi.ANY_SOURCE,
            mpi.Status,
        )
        self.largest_tag = cast("int", world.Get_attr(mpi.TAG_UB))
        self.ulfm = ulfm

    def failed(self) -> list[int]:
        """The ranks, by their new numbers, that MPI knows to be dead; without ULFM it does not tell."""
        if not self.ulfm:
            return []
        return failed_ranks(self.collectives)

    def free(self) -> None:
        """Free the communicators; nothing may be under way on them, in any rank."""
        self.collectives.Free()
        self.messages.Free()
