"""What is wrong with the ranks of a job, told from what they see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.studies.mpi_doctor import Seen, report, wrongs

GOOD = (
    Seen(
        0, 2, 2, "mpirun", "a", "Open MPI v5", "/lib/libmpi.so", (0, 1), 2, ("10.0.0.1/24",), {"torch": "2"}
    ),
    Seen(
        1, 2, 2, "mpirun", "b", "Open MPI v5", "/lib/libmpi.so", (0, 1), 2, ("10.0.0.2/24",), {"torch": "2"}
    ),
)


def test_nothing_is_wrong_with_a_rank_on_each_of_two_like_hosts() -> None:
    assert wrongs(GOOD) == []
    assert report(GOOD)[-1] == ("verdict", "nothing is wrong")


def test_ranks_that_are_all_the_first_have_another_mpi_than_their_launcher() -> None:
    (text,) = wrongs([replace(GOOD[0], mpi_size=1, cpus=(0,))])  # other ranks may use its other core
    assert text.startswith("mpirun started 2 ranks, but in each MPI sees 1")
    (text,) = wrongs([replace(GOOD[0], mpi_size=1, launcher="srun")])
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
def test_hosts_that_differ_are_told(changed: dict[str, object], said: str) -> None:
    found = wrongs([GOOD[0], replace(GOOD[1], **changed)])  # type: ignore[arg-type]
    assert [said in text for text in found] == ([True] if said else [])
