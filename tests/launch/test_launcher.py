"""Who started this process, from made-up environments."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tutti.errors import UserError
from tutti.launch.launcher import ALONE, LaunchContext, Launcher, ends_with_a_rank, started_by

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


OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PATH": "/bin"}, ALONE),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ALONE),  # an allocation without a step
        (TORCHRUN, ALONE),
        ({"TORCHELASTIC_RUN_ID": "none", **TORCHRUN}, LaunchContext(Launcher.TORCHRUN, 3, 4, 1, 2)),
        (OPEN_MPI, LaunchContext(Launcher.MPIRUN, 5, 8, 1, 4)),
        (MPICH, LaunchContext(Launcher.MPIRUN, 2, 4, 0, 2)),
        (SRUN, LaunchContext(Launcher.SRUN, 5, 7, 1, 3)),
    ],
)
def test_the_launcher_is_found_by_its_variables(environ: dict[str, str], expected: LaunchContext) -> None:
    found = started_by(environ)
    assert found == expected
    assert found.mpi == (found.launcher in (Launcher.MPIRUN, Launcher.SRUN))
    assert found.given == (found.launcher is not Launcher.ALONE)


def test_only_open_mpi_without_fault_tolerance_ends_a_job_with_its_first_rank() -> None:
    started = {"OMPI_COMM_WORLD_SIZE": "2"}
    assert ends_with_a_rank(started)
    assert not ends_with_a_rank({**started, "OMPI_MCA_mpi_ft_enable": "1"})
    assert not ends_with_a_rank(SRUN)


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
