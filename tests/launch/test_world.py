"""The communicator of a program that nobody launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.comm.mpi import library
from tutti.errors import UserError
from tutti.launch import world as joining


def test_alone_it_is_a_world_of_one_and_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_world", None)
    comm = joining.join()
    try:
        assert (comm.rank, comm.size) == (0, 1)
        assert joining.join() is comm
    finally:
        comm.close()


def test_what_starts_ranks_imports_neither_torch_nor_mpi() -> None:
    modules = ["placement", "start", "supervisor", "launcher", "mpirun", "world"]
    imports = ", ".join(f"tutti.launch.{name}" for name in modules)
    check = f"import sys, {imports}; print([m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == "[]"


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A rank of srun whose MPI sees no other; what is done with MPI."""
    done: list[str] = []
    (tmp_path / "segment").touch()
    monkeypatch.setattr(joining, "mpi_segments", lambda: (str(tmp_path / "segment"),))
    settings = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(library, "world_place", lambda: (0, 1, True))
    monkeypatch.setattr(library, "library", lambda: "Open MPI v5")
    monkeypatch.setattr(library, "finalize", lambda: done.append("left"))
    monkeypatch.setattr(library, "abort", lambda code: done.append(f"aborted with {code}"))
    monkeypatch.setattr(joining, "_world", None)
    monkeypatch.setattr(joining, "_CAUSE_S", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return done


def test_an_mpi_that_the_launcher_does_not_belong_to_is_refused_and_leaves_nothing(
    unseen: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"srun started 3 ranks, but MPI sees 1"):
        joining.join()
    assert (unseen, list(tmp_path.iterdir())) == (["left"], [])


@pytest.mark.parametrize(("rank", "says"), [("0", True), ("2", False)])
def test_of_ranks_that_do_not_see_each_other_the_first_says_why(
    rank: str,
    says: bool,
    unseen: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended: list[int] = []
    monkeypatch.setenv("SLURM_PROCID", rank)
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(UserError) as refused:
        joining.join()
    sys.excepthook(refused.type, refused.value, None)
    assert ended == [2]
    assert capfd.readouterr().err.startswith("tutti: error: srun started 3 ranks") == says
