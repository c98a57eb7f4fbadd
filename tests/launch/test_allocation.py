"""Slurm's allocation, from made-up environments."""

from __future__ import annotations

import pytest

from tutti.errors import BadOption
from tutti.launch.allocation import (
    Allocation,
    cores_of,
    cpus_here,
    expand_counts,
    expand_nodes,
    find_allocation,
)
from tutti.launch.cores import Cores
from tutti.launch.placement import Host, place_ranks, read_hosts

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[03-04],cpu1", "SLURM_TASKS_PER_NODE": "4(x2),2"}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        ("gpu[08-10,12],cpu1", ("gpu08", "gpu09", "gpu10", "gpu12", "cpu1")),
        ("r[1-2]n[1,3]", ("r1n1", "r1n3", "r2n1", "r2n3")),
        ("", ()),
    ],
)
def test_a_list_of_nodes_is_spelled_out(listed: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(listed) == names


@pytest.mark.parametrize(("listed", "counts"), [("4(x2),3", (4, 4, 3)), ("1", (1,)), ("", ()), ("many", ())])
def test_a_list_of_counts_is_spelled_out(listed: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(listed) == counts


def test_an_allocation_has_nodes_and_places() -> None:
    assert find_allocation(JOB) == Allocation(("gpu03", "gpu04", "cpu1"), (4, 4, 2))


def test_outside_of_slurm_there_is_no_allocation() -> None:
    assert find_allocation({"SLURM_CONF": "/etc/slurm.conf"}) is None
    assert cpus_here({"SLURM_CPUS_ON_NODE": "4"}) is None


@pytest.mark.parametrize(
    ("cpus", "physical", "logical", "cores"),
    [(4, 8, 8, 4), (8, 8, 8, None), (8, 8, 16, 4), (1, 8, 16, 1), (16, 8, 8, None)],
)
def test_the_cpus_of_a_job_that_is_bound_to_none_are_counted_in_cores(
    cpus: int, physical: int, logical: int, cores: int | None
) -> None:
    assert cores_of(cpus, physical, logical) == cores


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_job")
def test_hosts_of_an_allocation_have_a_rank_for_each_task() -> None:
    assert read_hosts("slurm") == (Host("gpu03", 4), Host("gpu04", 4), Host("cpu1", 2))


def test_the_hosts_of_an_allocation_need_one() -> None:
    with pytest.raises(BadOption, match=r"this process is in none; get one with salloc or sbatch"):
        read_hosts("slurm")


@pytest.mark.usefixtures("in_job")
@pytest.mark.parametrize("inherited", [{}, {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "4294967290"}])
def test_ranks_of_one_node_of_several_are_warned_about(
    inherited: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    (warning,) = place_ranks(1, cores=Cores(((0,),))).warnings
    assert warning.startswith("Slurm has allocated 3 nodes (gpu03, gpu04, cpu1), and this uses one of them")


@pytest.mark.usefixtures("in_job")
def test_a_task_of_srun_gets_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert place_ranks(1, cores=Cores(((0,),))).warnings == ()
