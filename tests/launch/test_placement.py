"""How ranks, threads and cores are planned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tutti.errors import BadOption
from tutti.launch.cores import Cores
from tutti.launch.launcher import Launcher
from tutti.launch.placement import Host, place_ranks


def machine(cores: int, threads: int = 1, quota: int | None = None) -> Cores:
    """A machine whose hyperthreads are numbered as Linux does: 0..cores-1 first."""
    return Cores(tuple(tuple(core + cores * i for i in range(threads)) for core in range(cores)), quota)


def test_auto_is_one_rank_for_each_core() -> None:
    placement = place_ranks("auto", cores=machine(2))
    assert (placement.workers, placement.threads, placement.cores) == (2, 1, ((0,), (1,)))
    assert placement.describe() == "2 ranks x 1 thread, bound to cores 0-1"


def test_auto_prefers_one_rank_for_each_physical_core() -> None:
    placement = place_ranks("auto", cores=machine(4, threads=2))
    assert (placement.workers, placement.threads, placement.cores[1]) == (4, 1, (1, 5))


def test_auto_keeps_within_the_quota_and_then_binds_nothing() -> None:
    placement = place_ranks("auto", cores=machine(16, quota=3))
    assert (placement.workers, placement.threads, placement.cores, placement.warnings) == (3, 1, (), ())


def test_cores_are_shared_as_threads_and_consecutive_groups() -> None:
    placement = place_ranks(2, cores=machine(8))
    assert (placement.threads, placement.cores) == (4, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert placement.describe() == "2 ranks x 4 threads, bound to cores 0-7"


def test_groups_differ_by_at_most_one_core() -> None:
    placement = place_ranks(3, cores=machine(8))
    assert sorted(len(group) for group in placement.cores) == [2, 3, 3]
    assert sorted(cpu for group in placement.cores for cpu in group) == list(range(8))
    assert placement.threads == 2


def test_hyperthreads_count_as_cores_only_when_ranks_outnumber_cores() -> None:
    placement = place_ranks(4, cores=machine(2, threads=2))
    assert (placement.threads, placement.cores, placement.warnings) == (1, ((0,), (1,), (2,), (3,)), ())


def test_more_ranks_than_cores_are_not_bound_and_a_warning_names_both_numbers() -> None:
    placement = place_ranks(5, cores=machine(2))
    assert (placement.threads, placement.cores) == (1, ())
    assert len(placement.warnings) == 1
    assert "5 ranks" in placement.warnings[0]
    assert "2 cores" in placement.warnings[0]


def test_one_worker_has_all_cores_as_threads_and_is_not_bound() -> None:
    placement = place_ranks(1, cores=machine(8))
    assert (placement.threads, placement.cores) == (8, ())
    assert placement.describe() == "1 rank x 8 threads"


@pytest.mark.parametrize("workers", ["0", "-1", "two", 0, 65])
def test_a_senseless_number_of_workers_is_refused(workers: str | int) -> None:
    with pytest.raises(BadOption, match=r"--workers is|65 ranks"):
        place_ranks(workers, cores=machine(2))


def test_a_senseless_number_of_threads_is_refused() -> None:
    with pytest.raises(BadOption, match="--threads is 0"):
        place_ranks(1, 0, cores=machine(2))


def test_hosts_decide_the_number_of_ranks(tmp_path: Path) -> None:
    placement = place_ranks("auto", hosts="a:4,b:2")
    assert (placement.workers, placement.threads, placement.hosts) == (6, None, (Host("a", 4), Host("b", 2)))
    assert placement.describe() == "6 ranks on 2 hosts (a: 4, b: 2), started by mpirun"


def test_more_workers_than_the_hosts_have_places_for_are_refused() -> None:
    with pytest.raises(BadOption, match=r"--workers is 7.*6 ranks"):
        place_ranks(7, hosts="a:4,b:2")


def test_under_a_launcher_its_ranks_are_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
    placement = place_ranks("auto")
    assert (placement.workers, placement.launcher) == (4, Launcher.MPIRUN)
    assert placement.describe() == "4 ranks, started by mpirun"
    with pytest.raises(BadOption, match=r"--workers is 2, but mpirun has started 4 ranks"):
        place_ranks(2)
    with pytest.raises(BadOption, match=r"leave --hosts out"):
        place_ranks("auto", hosts="a:4")
