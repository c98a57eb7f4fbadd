"""Which cores a process may use, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.launch.cores import (
    Cores,
    allowed_cores,
    cpu_quota,
    group_siblings,
    parse_cpu_list,
    share_of,
)


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


def test_hyperthreads_of_one_core_are_grouped(tmp_path: Path) -> None:
    machine = topology(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"})
    assert group_siblings([0, 1, 4, 5], machine) == ((0, 4), (1, 5))


def test_a_hyperthread_that_is_not_allowed_is_left_out(tmp_path: Path) -> None:
    machine = topology(tmp_path, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert group_siblings([1, 2, 3], machine) == ((1,), (2, 3))


def test_without_a_readable_topology_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert group_siblings([3, 1], tmp_path) == ((1,), (3,))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0-2", [0, 1, 2]), ("0-1,8,10-11", [0, 1, 8, 10, 11])]
)
def test_kernel_lists_of_cpus_are_read(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


def test_quota_of_version_2_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    quotas = {"/": "max 100000", "/a": "150000 100000", "/a/b": "400000 100000"}
    assert cpu_quota(*control_group(tmp_path, quotas, "0::/a/b\n")) == 1.5


def test_in_a_container_the_quota_at_the_root_counts(tmp_path: Path) -> None:
    quotas = {"/": "200000 100000"}
    assert cpu_quota(*control_group(tmp_path, quotas, "0::/docker/4711\n")) == 2.0


def test_no_quota_is_none(tmp_path: Path) -> None:
    assert cpu_quota(*control_group(tmp_path, {"/": "max 100000"}, "0::/\n")) is None
    assert cpu_quota(tmp_path, tmp_path / "missing") is None


def test_usable_cores_are_never_more_than_the_quota() -> None:
    cores = Cores(((0, 4), (1, 5), (2, 6), (3, 7)), quota=2)
    assert (cores.usable, cores.limited) == (2, True)
    assert (Cores(cores.physical).usable, Cores(cores.physical, quota=8).limited) == (4, False)


def test_this_machine_has_cores() -> None:
    assert allowed_cores().usable >= 1


def test_ranks_with_the_same_cores_share_them() -> None:
    same = Cores(tuple((cpu,) for cpu in range(8)))
    assert [share_of(rank, [same, same, same]) for rank in range(3)] == [2, 2, 2]


def test_ranks_with_cores_of_their_own_use_them_all() -> None:
    first, second = Cores(((0,), (1,), (2,))), Cores(((3,),))
    assert (share_of(0, [first, second]), share_of(1, [first, second])) == (3, 1)


def test_a_quota_is_shared_by_the_ranks() -> None:
    limited = Cores(tuple((cpu,) for cpu in range(16)), quota=4)
    assert share_of(0, [limited, limited]) == 2


def test_a_rank_has_at_least_one_thread() -> None:
    one = Cores(((0,),))
    assert share_of(2, [one, one, one]) == 1
