"""Ranks that keep the parameter centre: how many each host gets, which they are, and what they may use."""

from __future__ import annotations

import os

import pytest

from tests.launch.processes import wait_until_gone
from tutti.errors import BadOption
from tutti.launch.cores import Cores
from tutti.launch.placement import Host, place_ranks
from tutti.launch.start import start

TWO = Cores(((0,), (1,)))


def test_a_server_takes_no_core_from_the_workers() -> None:
    placement = place_ranks("auto", cores=TWO, servers=1)
    assert (placement.workers, placement.servers, placement.ranks) == (2, 1, 3)
    assert (placement.threads, placement.cores, placement.warnings) == (1, ((0,), (1,)), ())
    assert placement.describe() == "2 ranks x 1 thread and 1 server, bound to cores 0-1"
    assert place_ranks(1, cores=TWO, servers=2).describe() == "1 rank x 2 threads and 2 servers"


def test_hosts_get_servers_beside_their_workers() -> None:
    placement = place_ranks(hosts="a:4,b:2", servers=1)
    assert (placement.workers, placement.servers, placement.hosts) == (6, 1, (Host("a", 4), Host("b", 2)))
    assert placement.hosts_with_servers == (Host("a", 4), Host("b", 3))
    assert placement.describe() == "6 ranks and 1 server on 2 hosts (a: 4, b: 2), started by mpirun"


def test_under_a_launcher_servers_are_some_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
    placement = place_ranks("auto", servers=1)
    assert (placement.workers, placement.servers, placement.ranks) == (3, 1, 4)
    assert place_ranks(3, servers=1) == placement
    with pytest.raises(BadOption, match=r"--workers is 4, but mpirun has started 4 ranks, 1 of them"):
        place_ranks(4, servers=1)
    with pytest.raises(BadOption, match=r"--servers is 4, but mpirun has started 4 ranks in all"):
        place_ranks("auto", servers=4)


def test_a_negative_number_of_servers_is_refused() -> None:
    with pytest.raises(BadOption, match="--servers is -1"):
        place_ranks(2, cores=TWO, servers=-1)


def check_sides(sides: object, workers: int, servers: int) -> None:
    """What `launch.entries:take_sides` returned is right for such a world."""
    assert isinstance(sides, list)
    assert [one["serving"] for one in sides] == [False] * workers + [True] * servers
    assert [one["team"] for one in sides] == [(rank, workers) for rank in range(workers)] + [
        (rank, servers) for rank in range(servers)
    ]
    assert {one["answer"] for one in sides[:workers]} == {float(sum(range(workers)))}
    assert [one["threads"] for one in sides[workers:]] == [1] * servers


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2)])
def test_workers_and_servers_under_our_supervisor(workers: int, servers: int) -> None:
    placement = place_ranks(workers, servers=servers)
    sides = start("tests.launch.entries:take_sides", str(servers).encode(), placement)
    check_sides(sides, workers, servers)
    assert isinstance(sides, list)
    allowed = sorted(os.sched_getaffinity(0))
    assert [one["cores"] for one in sides[workers:]] == [allowed] * servers
    assert [one["threads"] for one in sides[:workers]] == [placement.threads] * workers
    assert wait_until_gone(one["pid"] for one in sides) == []
