"""The problems of ranks, by their views of the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.studies.mpi_doctor import Seen, report, wrongs

ONE = Seen(0, 2, 2, "mpirun", "a", "Open MPI v5", "/mpi.so", (0, 1), 2, ("10.0.0.1/24",), {"torch": "2"})
GOOD = (ONE, replace(ONE, rank=1, host="b", networks=("10.0.0.2/24",)))


def test_two_equal_hosts_have_no_problem() -> None:
    assert wrongs(GOOD) == []
    assert report(GOOD)[-1] == ("verdict", "nothing is wrong")


def test_another_mpi_than_the_launchers_is_named() -> None:
    (text,) = wrongs([replace(ONE, mpi_size=1)])
    assert text.startswith("mpirun started 2 ranks, but in each MPI sees 1")
    (text,) = wrongs([replace(ONE, mpi_size=1, launcher="srun")])
    assert "srun --mpi=pmix" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"library": "MPICH 4"}, "MPI's library differs (a: Open MPI v5, b: MPICH 4)"),
        ({"versions": {"torch": "3"}}, "torch differs (a: 2, b: 3)"),
        (
            {"networks": ("10.9.0.2/24",)},
            "no network is common to all hosts (a: 10.0.0.1/24; b: 10.9.0.2/24)",
        ),
        ({"host": "a", "networks": ()}, ""),
    ],
)
def test_differences_between_hosts_are_named(changed: dict[str, object], said: str) -> None:
    found = wrongs([ONE, replace(GOOD[1], **changed)])  # type: ignore[arg-type]
    assert [said in text for text in found] == ([True] if said else [])
