"""The placement of ranks on cores and hosts."""

from __future__ import annotations

import os

import pytest

from tutti.errors import BadOption
from tutti.launch.cores import Cores
from tutti.launch.launcher import Launcher
from tutti.launch.placement import Host, place_ranks


def machine(cores: int, threads: int = 1, quota: int | None = None) -> Cores:
    """A machine whose hyperthreads are numbered as Linux does: 0..cores-1 first."""
    return Cores(tuple(tuple(core + cores * i for i in range(threads)) for core in range(cores)), quota)


@pytest.mark.parametrize(
    ("workers", "cores", "expected"),
    [
        ("auto", machine(2), (2, 1, ((0,), (1,)))),
        # One rank for each physical core.
        ("auto", machine(3, threads=2), (3, 1, ((0, 3), (1, 4), (2, 5)))),
        # Within a quota nothing is bound.
        ("auto", machine(16, quota=3), (3, 1, ())),
        (2, machine(8), (2, 4, ((0, 1, 2, 3), (4, 5, 6, 7)))),
        (3, machine(8), (3, 2, ((0, 1), (2, 3, 4), (5, 6, 7)))),
        # Hyperthreads count as cores if ranks outnumber the cores.
        (4, machine(2, threads=2), (4, 1, ((0,), (1,), (2,), (3,)))),
        (1, machine(8), (1, 8, ())),
    ],
)
def test_ranks_share_the_cores(workers: str | int, cores: Cores, expected: tuple[object, ...]) -> None:
    placement = place_ranks(workers, cores=cores)
    assert (placement.workers, placement.threads, placement.cores) == expected
    assert placement.warnings == ()


def test_a_placement_is_described_in_a_line() -> None:
    assert place_ranks("auto", cores=machine(2)).describe() == "2 ranks x 1 thread, bound to cores 0-1"
    assert place_ranks(2, cores=machine(8)).describe() == "2 ranks x 4 threads, bound to cores 0-7"
    assert place_ranks(1, cores=machine(8)).describe() == "1 rank x 8 threads"


def test_more_ranks_than_cores_are_not_bound_and_a_warning_names_both_numbers() -> None:
    placement = place_ranks(5, cores=machine(2))
    assert (placement.threads, placement.cores) == (1, ())
    (warning,) = placement.warnings
    assert "5 ranks are more than the 2 cores" in warning


@pytest.mark.parametrize(
    ("workers", "threads", "message"),
    [
        ("0", None, "--workers is '0'"),
        ("-1", None, "--workers is '-1'"),
        ("two", None, "--workers is 'two'"),
        (0, None, "--workers is '0'"),
        (65, None, "65 ranks are too many"),
        (1, 0, "--threads is 0"),
    ],
)
def test_impossible_numbers_are_refused(workers: str | int, threads: int | None, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        place_ranks(workers, threads, cores=machine(2))


def test_hosts_decide_the_number_of_ranks() -> None:
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
