"""Who has left a group whose ranks are on several hosts, and when its MPI communicators can be freed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tutti.comm.mpi.farewells import Farewells, free_later, free_what_is_over
from tutti.comm.mpi.group import MpiGroup
from tutti.comm.shm.liveness import LONGEST_NAP_S
from tutti.torch_backend.errors import RankLost

TOLD_WITHIN_S: Final = 1.0
"""How long to wait for MPI to say who died, when all it said is that somebody did."""


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
        self._mpi, self._names = mpi, tuple(names)
        self._all_here_left, self._report = all_here_left, report
        self._farewells = Farewells(mpi.module, mpi.collectives, elsewhere)
        self._abandoned: list[Any] = []
        free_what_is_over(mpi.error)

    def early(self, begun: int) -> list[int]:
        """The ranks of other hosts that have left, and will not come to the latest of `begun` collectives."""
        self._look()
        return self._farewells.early(begun)

    def has_left(self, rank: int) -> bool:
        """Whether a rank of another host has left, and nothing that it sent can still come."""
        self._look()
        return self._farewells.has_left(rank)

    def _look(self) -> None:
        try:
            lost = self._farewells.look(self._failed)
        except self._mpi.error as error:
            raise self.explained(error) from error
        for name in lost[:1]:
            self._report(name)

    def _failed(self) -> list[int]:
        return [self._names[rank] for rank in self._mpi.failed()]

    def explained(self, error: Exception) -> RankLost:
        """What an error of MPI's means."""
        deadline = time.monotonic() + TOLD_WITHIN_S
        while not (lost := self._failed()) and time.monotonic() < deadline and self._mpi.ulfm:
            time.sleep(LONGEST_NAP_S)
        for name in lost[:1]:
            self._report(name)
        return RankLost(lost, f"MPI says: {error}")

    def abandon(self, requests: Sequence[Any]) -> None:
        """Keep what is under way, and its memory, although nobody waits for it any more."""
        self._abandoned += requests

    def leave(self, done: int, lost: Sequence[int]) -> None:
        """Tell the ranks of other hosts that this one leaves.

        Args:
            done: how many collectives it has finished.
            lost: whom it leaves for, numbered in the job, if it had lost somebody.
        """
        try:
            self._farewells.say(done, lost)
        except self._mpi.error:
            # Somebody is dead, and MPI tells the others.
            return
        free_later(self._over, self._mpi.free)
        free_what_is_over(self._mpi.error)

    def _over(self) -> bool:
        """Whether all ranks have left, and nothing is under way."""
        return (
            self._farewells.all_over()
            and self._all_here_left()
            and all(request.Test() for request in self._abandoned)
        )
