"""The communicator of a program that nobody launched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.comm.shm.communicator import HostCommunicator
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


def test_an_mpi_that_the_launcher_does_not_belong_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = HostCommunicator.alone()
    monkeypatch.setattr(MpiCommunicator, "world", lambda: alone)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setattr(joining, "_world", None)
    try:
        with pytest.raises(UserError, match=r"mpirun started 3 ranks, but MPI sees 1"):
            joining.join()
    finally:
        alone.close()
