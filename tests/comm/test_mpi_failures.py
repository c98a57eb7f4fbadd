"""The meaning of MPI's errors and of leave notices, with a fake MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tutti.comm.mpi.group import Membership, MpiGroup
from tutti.errors import PeerLost

OTHER, FAILED, PENDING, REVOKED = 16, 75, 76, 77


class Failure(Exception):
    def __init__(self, kind: int) -> None:
        self.kind = kind

    def Get_error_class(self) -> int:
        return self.kind


class Host:
    """The processes of a host, which are told who is lost."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def report(self, name: int) -> None:
        self.lost.append(name)

    def check(self) -> None:
        raise PeerLost(self.lost, "on another host")


def member(dead: tuple[int, ...] = (), notices: tuple[tuple[int, ...], ...] = (), ulfm: bool = True) -> Any:
    """Rank 0 of a group of ranks 10, 11 and 12, whose MPI says who is dead; rank 1 has sent the notices."""
    coming = [numpy.array(words) for words in notices]

    def improbe(source: int, tag: int, status: object) -> Any:
        if not coming:
            return None
        return SimpleNamespace(Recv=lambda words: words.__setitem__(slice(None), coming.pop(0)))

    comm = SimpleNamespace(
        Get_failed=lambda: SimpleNamespace(
            size=len(dead), Translate_ranks=lambda *_: list(dead), Free=lambda: None
        ),
        Get_group=lambda: None,
        Set_errhandler=lambda _: None,
        Improbe=improbe,
    )
    world = SimpleNamespace(
        Get_group=lambda: SimpleNamespace(Incl=lambda _: SimpleNamespace(Free=lambda: None)),
        Create_group=lambda *_: comm,
        Get_attr=lambda _: 32767,
    )
    mpi = SimpleNamespace(
        COMM_WORLD=world,
        ERRORS_RETURN=None,
        ERR_PROC_FAILED=FAILED,
        ERR_PROC_FAILED_PENDING=PENDING,
        ERR_REVOKED=REVOKED,
        ANY_SOURCE=-1,
        BYTE=None,
        TAG_UB=0,
        Status=lambda: SimpleNamespace(Get_source=lambda: 1),
        Exception=Failure,
    )
    peers: Any = Host()
    return Membership(MpiGroup(mpi, range(3), 0, ulfm), 0, (10, 11, 12), peers)


def fail(kind: int) -> None:
    raise Failure(kind)


@pytest.mark.parametrize("kind", [FAILED, PENDING, REVOKED])
def test_errors_about_a_dead_rank_become_peer_lost_and_the_host_is_told(kind: int) -> None:
    membership = member(dead=(1,))
    with pytest.raises(PeerLost, match="MPI says") as lost:
        membership.call(fail, kind)
    assert lost.value.ranks == membership._peers.lost == [11]


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(Failure):
        member(dead=(1,)).call(fail, OTHER)
    with pytest.raises(Failure):
        member(dead=(1,), ulfm=False).call(fail, FAILED)


def test_a_rank_that_left_before_the_collective_is_early_and_one_that_left_after_it_is_not() -> None:
    membership = member(notices=((3, -1),))
    membership.begun = 3
    assert membership.early() == []
    membership.begun = 4
    assert membership.early() == [1]


def test_a_loss_that_a_notice_names_is_raised_and_the_host_is_told() -> None:
    membership = member(notices=((3, 12),))
    with pytest.raises(PeerLost) as lost:
        membership.early()
    assert lost.value.ranks == membership._peers.lost == [12]


def test_a_death_that_only_mpi_knows_of_is_raised() -> None:
    with pytest.raises(PeerLost) as lost:
        member(dead=(2,)).check()
    assert lost.value.ranks == [12]
