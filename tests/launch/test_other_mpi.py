"""Ranks that another mpirun than the environment's own has started, where Debian's packages are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.mpirun import RENDEZVOUS, needs_mpirun
from tutti.launch.mpi_library import library_beside

pytestmark = [needs_mpirun, pytest.mark.mpi]

DOCTOR = (sys.executable, "-P", "-m", "tutti", "doctor", "--mpi")


def doctor(*launcher: str, **settings: str) -> str:
    """What the first of two ranks says."""
    inherited = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    command = [*launcher, "-n", "2", *DOCTOR]
    done = subprocess.run(
        command, env={**inherited, **settings}, capture_output=True, text=True, check=False, timeout=100
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Debian's package openmpi-bin is not here")
def test_under_debians_open_mpi_ranks_load_its_own_library() -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    said = doctor("mpirun.openmpi", "--oversubscribe", *root)
    assert "2, started by mpirun; MPI sees 2" in said
    assert "Open MPI v4" in said


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="Debian's package mpich is not here")
def test_under_debians_mpich_ranks_load_its_own_library_once_it_has_the_name(tmp_path: Path) -> None:
    launcher = shutil.which("mpiexec.hydra")
    assert launcher is not None
    library = library_beside(Path(launcher).resolve(), mpich=True)
    assert library is not None
    if library.name.startswith("libmpich"):
        assert f"ln -s {library} ~/mpich/libmpi.so.12" in doctor(launcher)
    (tmp_path / "libmpi.so.12").symlink_to(library)
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    said = doctor(launcher, LD_LIBRARY_PATH=path)
    assert "2, started by mpirun; MPI sees 2" in said
    assert "MPICH" in said
