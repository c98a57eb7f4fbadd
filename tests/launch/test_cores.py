"""Which cores a process may use, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.launch.cores import Cores, allowed_cores, cpu_quota, group_siblings, parse_cpu_list, share_of


def topology(root: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    return root


def control_group(root: Path, quotas: dict[str, str], line: str) -> tuple[Path, Path]:
    for path, quota in quotas.items():
        folder = root / "mount" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(quota)
    (root / "cgroup").write_text(line)
    return root / "mount", root / "cgroup"


@pytest.mark.parametrize(
    ("siblings", "allowed", "cores"),
    [
        ({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, [0, 1, 4, 5], ((0, 4), (1, 5))),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [1, 2, 3], ((1,), (2, 3))),  # CPU 0 is not allowed
        ({}, [3, 1], ((1,), (3,))),  # the topology cannot be read
    ],
)
def test_hyperthreads_are_grouped_by_core(
    tmp_path: Path, siblings: dict[int, str], allowed: list[int], cores: tuple[tuple[int, ...], ...]
) -> None:
    assert group_siblings(allowed, topology(tmp_path, siblings)) == cores


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0-2", [0, 1, 2]), ("0-1,8,10-11", [0, 1, 8, 10, 11])]
)
def test_kernel_lists_of_cpus_are_read(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize(
    ("quotas", "group", "quota"),
    [
        ({"/": "max 100000", "/a": "150000 100000", "/a/b": "400000 100000"}, "/a/b", 1.5),  # the smallest
        ({"/": "200000 100000"}, "/docker/4711", 2.0),  # in a container
        ({"/": "max 100000"}, "/", None),
        ({}, "/", None),
    ],
)
def test_the_quota_comes_from_the_control_group(
    tmp_path: Path, quotas: dict[str, str], group: str, quota: float | None
) -> None:
    assert cpu_quota(*control_group(tmp_path, quotas, f"0::{group}\n")) == quota


def test_usable_cores_are_never_more_than_the_quota() -> None:
    cores = Cores(((0, 4), (1, 5), (2, 6), (3, 7)), quota=2)
    assert (cores.usable, cores.limited) == (2, True)
    assert (Cores(cores.physical).usable, Cores(cores.physical, quota=8).limited) == (4, False)


def test_this_machine_has_cores() -> None:
    assert allowed_cores().usable >= 1


EIGHT = tuple((cpu,) for cpu in range(8))


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        ([Cores(EIGHT)] * 3, [2, 2, 2]),
        ([Cores(EIGHT[:3]), Cores(EIGHT[3:4])], [3, 1]),  # each has its own cores
        ([Cores(EIGHT, quota=4)] * 2, [2, 2]),
        ([Cores(EIGHT[:1])] * 3, [1, 1, 1]),
    ],
)
def test_ranks_share_the_cores_of_a_host_as_threads(ranks: list[Cores], threads: list[int]) -> None:
    assert [share_of(rank, ranks) for rank in range(len(ranks))] == threads
