"""Ranks under mpirun: on this machine as it is, and on several hosts that it is said to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.mpi.mpirun import mpirun, needs_mpirun, results
from tutti.comm.mpi.transport import MpiRequests
from tutti.comm.shm.liveness import LEFT_EARLY
from tutti.errors import PeerLost

pytestmark = [pytest.mark.mpi, needs_mpirun, pytest.mark.timeout(240)]


def test_sends_are_begun_before_receives() -> None:
    """An answer to a long send is not to wait in TCP behind the vector of the other direction."""
    begun: list[str] = []
    comm = SimpleNamespace(Isend=lambda *_: begun.append("send"), Irecv=lambda *_: begun.append("receive"))
    MpiRequests(SimpleNamespace(), comm).begin({1: torch.ones(1)}, {1: torch.ones(1)})
    assert begun == ["send", "receive"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_contract_on_one_host(ranks: int) -> None:
    done = mpirun(ranks, "contract.py")
    assert results(done) == [{"hosts": 1, "size": ranks, "failures": {}}], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("hosts", ["aab", "abbca"])
def test_contract_on_several_hosts(hosts: str) -> None:
    done = mpirun(len(hosts), "contract.py", hosts)
    assert results(done) == [{"hosts": len(set(hosts)), "size": len(hosts), "failures": {}}], done.stderr
    assert done.returncode == 0


def test_a_dead_rank_ends_the_job() -> None:
    done = mpirun(3, "lost_rank.py", "aab")
    assert done.returncode != 0


@pytest.mark.parametrize(("hosts", "operation"), [("ab", "recv"), ("aab", "barrier")])
def test_a_rank_that_ends_early_is_named_to_the_hosts_that_wait_for_it(hosts: str, operation: str) -> None:
    done = mpirun(len(hosts), "leaving.py", hosts, operation, timeout_s=100)
    # mpirun's is that of the first rank that it finds ended: 1 of one that lost the other, or 3 of the other,
    # which waits for the rest in MPI's end, and is free to go once one of them is gone.
    assert done.returncode in (1, 3)
    assert str(PeerLost([len(hosts) - 1], LEFT_EARLY)) in done.stderr


def test_the_clocks_of_two_hosts_are_as_far_apart_as_is_told_and_a_trace_goes_across() -> None:
    done = mpirun(4, "clocks.py", "aabb")
    assert done.returncode == 0, done.stderr
    (found,) = results(done)
    for ahead_s, residual_s, truth_s in found["clocks"]:
        assert abs(ahead_s - truth_s) <= residual_s + 1e-9
    assert (found["spans"]["barrier"], found["spans"]["exchange"]) == (3 * 4, 3 * 4)
