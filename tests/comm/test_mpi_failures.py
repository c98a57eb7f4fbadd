"""The meaning of leave notices, with a fake MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tutti.comm.mpi.group import Membership
from tutti.errors import PeerLost


class Host:
    """The processes of a host, which are told who is lost."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def report(self, name: int) -> None:
        self.lost.append(name)

    def check(self) -> None:
        raise PeerLost(self.lost, "on another host")


def member(*notices: tuple[int, int]) -> Any:
    """Rank 0 of a group of ranks 10, 11 and 12; rank 1 has sent the notices."""
    coming = [numpy.array(words) for words in notices]

    def improbe(source: int, tag: int, status: object) -> Any:
        if not coming:
            return None
        return SimpleNamespace(Recv=lambda words: words.__setitem__(slice(None), coming.pop(0)))

    mpi: Any = SimpleNamespace(
        collectives=SimpleNamespace(Improbe=improbe),
        any_source=-1,
        status=lambda: SimpleNamespace(Get_source=lambda: 1),
    )
    peers: Any = Host()
    return Membership(mpi, 0, (10, 11, 12), peers)


def test_a_rank_that_left_before_the_collective_is_early_and_one_that_left_after_it_is_not() -> None:
    membership = member((3, -1))
    membership.begun = 3
    assert membership.early() == []
    membership.begun = 4
    assert membership.early() == [1]


def test_a_loss_that_a_notice_names_is_raised_and_the_host_is_told() -> None:
    membership = member((3, 12))
    with pytest.raises(PeerLost) as lost:
        membership.early()
    assert lost.value.ranks == membership._peers.lost == [12]
