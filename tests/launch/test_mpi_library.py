"""Which MPI library a rank loads, by the launcher that has started it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tutti.launch.mpi_library import SEGMENT_BYTES, library_beside, make_room, use_library_of


@pytest.mark.parametrize(
    ("program", "library", "mpich"),
    [
        ("bin/orterun", "lib/x86_64-linux-gnu/libmpi.so.40", False),
        ("bin/prterun", "lib/libmpi.so.40", False),
        ("bin/mpiexec.hydra", "lib64/mpich/lib/libmpi.so.12", True),
    ],
)
def test_the_library_beside_a_launcher_is_found(
    tmp_path: Path, program: str, library: str, mpich: bool
) -> None:
    file = tmp_path / library
    file.parent.mkdir(parents=True)
    file.touch()
    assert library_beside(tmp_path / program, mpich) == file
    assert library_beside(tmp_path / program, not mpich) is None


def test_the_environments_own_launcher_leaves_the_choice_to_mpi4py() -> None:
    assert library_beside(Path(sys.prefix, "bin", "prterun"), mpich=False) is None


@pytest.mark.parametrize(("free", "elsewhere"), [(4 * SEGMENT_BYTES, False), (SEGMENT_BYTES, True)])
def test_shared_memory_without_room_for_all_ranks_is_made_in_the_temporary_folder(
    free: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ: dict[str, str] = {}
    make_room(4, environ)
    assert environ.get("OMPI_MCA_btl_sm_backing_directory") == (str(tmp_path) if elsewhere else None)
    chosen = {"OMPI_MCA_btl_sm_backing_directory": "/elsewhere"}
    make_room(4, chosen)
    assert chosen["OMPI_MCA_btl_sm_backing_directory"] == "/elsewhere"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[int]:
    """A process that is called as MPICH's launcher, with its library; returns its number."""
    program = tmp_path / "bin" / "mpiexec.hydra"
    program.parent.mkdir()
    shutil.copy("/bin/sleep", program)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.12").touch()
    with subprocess.Popen([str(program), "60"]) as process:
        yield process.pid
        process.kill()


def test_a_rank_takes_the_library_of_its_launcher_unless_the_user_has_chosen(
    launcher: int, tmp_path: Path
) -> None:
    environ: dict[str, str] = {}
    use_library_of([(os.getpid(), "bash"), (launcher, "mpiexec.hydra")], environ)
    assert environ == {"MPI4PY_LIBMPI": str(tmp_path / "lib" / "libmpi.so.12")}
    chosen = {"MPI4PY_MPIABI": "openmpi"}
    use_library_of([(launcher, "mpiexec.hydra")], chosen)
    assert chosen == {"MPI4PY_MPIABI": "openmpi"}
