"""The meaning of MPI's errors, with a fake MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.comm.mpi.failures import MpiJob
from tutti.errors import PeerLost

OTHER, FAILED, PENDING, REVOKED = 16, 75, 76, 77


class Failure(Exception):
    def __init__(self, kind: int) -> None:
        self.kind = kind

    def Get_error_class(self) -> int:
        return self.kind


def job(dead: tuple[int, ...], revoked: bool, ulfm: bool = True) -> MpiJob:
    """A job whose MPI says who is dead and whether its one communicator was revoked."""
    failed = SimpleNamespace(
        size=len(dead), Translate_ranks=lambda ranks, group: list(dead), Free=lambda: None
    )
    world = SimpleNamespace(
        Get_failed=lambda: failed,
        Get_group=lambda: None,
        Get_size=lambda: 2,
        Iprobe=lambda *_: False,
    )
    mpi: Any = SimpleNamespace(
        COMM_WORLD=world,
        ERRORS_RETURN=None,
        ERR_OTHER=OTHER,
        ERR_PROC_FAILED=FAILED,
        ERR_PROC_FAILED_PENDING=PENDING,
        ERR_REVOKED=REVOKED,
        ANY_SOURCE=-1,
        Exception=Failure,
    )
    peers = SimpleNamespace(report=lambda name: None, group=SimpleNamespace(global_ranks=(0,)))
    made = MpiJob(mpi, SimpleNamespace(_peers=peers), ulfm)  # type: ignore[arg-type]
    comm = SimpleNamespace(
        Set_errhandler=lambda handler: None,
        Is_revoked=lambda: revoked,
        Revoke=lambda: None,
        Get_rank=lambda: 0,
        Get_size=lambda: 2,
    )
    made.adopt(comm)
    return made


@pytest.mark.parametrize("kind", [OTHER, FAILED, PENDING, REVOKED])
def test_errors_about_a_dead_rank_become_peer_lost(kind: int) -> None:
    found = job(dead=(1,), revoked=False).explained(Failure(kind))
    assert isinstance(found, PeerLost)
    assert found.ranks == [1]


def test_a_collective_that_was_cut_short_by_a_revocation_means_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tutti.comm.mpi.group.TOLD_WITHIN_S", 0.0)
    assert isinstance(job(dead=(), revoked=True).explained(Failure(OTHER)), PeerLost)


def test_other_errors_stay_what_they_are() -> None:
    error = Failure(OTHER)
    assert job(dead=(), revoked=False).explained(error) is error
    assert job(dead=(1,), revoked=True, ulfm=False).explained(error) is error
