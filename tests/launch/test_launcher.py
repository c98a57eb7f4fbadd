"""Who started this process, from made-up environments."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tutti.errors import UserError
from tutti.launch.launcher import ALONE, Launcher, ends_with_a_rank, started_by

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


@pytest.fixture(autouse=True)
def _mpi4py_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_a_plain_python_is_alone() -> None:
    assert started_by({"PATH": "/bin"}) == ALONE


def test_open_mpi_tells_rank_size_and_place() -> None:
    found = started_by(
        {
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        }
    )
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (
        Launcher.MPIRUN, 5, 8, 1, 4,
    )  # fmt: skip
    assert found.mpi


def test_only_open_mpi_without_fault_tolerance_ends_a_job_with_its_first_rank() -> None:
    started = {"OMPI_COMM_WORLD_SIZE": "2"}
    assert ends_with_a_rank(started)
    assert not ends_with_a_rank({**started, "OMPI_MCA_mpi_ft_enable": "1"})
    assert not ends_with_a_rank(SRUN)


def test_mpich_and_intel_mpi_are_recognised() -> None:
    found = started_by({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"})
    assert (found.launcher, found.rank, found.size, found.local_size) == (Launcher.MPIRUN, 2, 4, 2)


def test_a_task_of_srun_is_recognised() -> None:
    found = started_by(SRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (
        Launcher.SRUN, 5, 7, 1, 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "terminal"),
    [
        ({"SLURM_STEP_ID": "4294967290"}, True),  # the interactive shell of salloc
        ({"SLURM_STEP_ID": "4294967291"}, False),  # a batch script
        ({"SLURM_PTY_PORT": "40000"}, True),  # typed into srun --pty bash
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),  # srun of a single task
    ],
)
def test_shells_and_scripts_in_an_allocation_are_alone(
    change: dict[str, str], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    assert started_by({**SRUN, **change, "PMI_SIZE": "1", "PMI_RANK": "0"}) == ALONE


def test_a_task_of_srun_in_a_shell_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    assert started_by({**SRUN, "SLURM_PTY_PORT": "40000"}).size == 7


def test_an_allocation_without_a_step_is_alone() -> None:
    assert started_by({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) == ALONE


@pytest.mark.parametrize("environ", [SRUN, {"OMPI_COMM_WORLD_SIZE": "2"}])
def test_without_mpi4py_a_launcher_is_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tutti\[mpi\]'"):
        started_by(environ)


def test_a_launcher_that_tells_no_size_is_refused() -> None:
    with pytest.raises(UserError, match="does not tell how many"):
        started_by({"PMIX_RANK": "3"})


def test_torchrun_tells_rank_size_and_place() -> None:
    told = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = started_by({"TORCHELASTIC_RUN_ID": "none", **told})
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (
        Launcher.TORCHRUN, 3, 4, 1, 2,
    )  # fmt: skip
    assert found.given
    assert not found.mpi
    assert started_by(told) == ALONE
