"""The MPI library. Importing `mpi4py.MPI` initialises MPI: only functions that need it do that. No torch."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from tutti.comm.shm.liveness import LONGEST_NAP_S


def load() -> Any:
    """Return the module `mpi4py.MPI` (initialises MPI)."""
    from mpi4py import MPI

    return MPI


def library() -> str:
    """Return the MPI library's name and version (initialises MPI)."""
    MPI = load()
    first, *_ = MPI.Get_library_version().replace("\0", "").strip().splitlines()
    return " ".join(first.split(",")[0].split())


def library_file() -> str:
    """Return the path of the MPI library that this process has loaded; empty if unknown."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = (line.split(maxsplit=5)[-1] for line in lines)
    return next((file for file in files if re.match(r"lib(mpi|mpich)\.so", Path(file).name)), "")


def abort(code: int) -> None:
    """End all other ranks of the job, and as a rule this one, at once, with this exit code."""
    MPI = load()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def finalize() -> None:
    """Leave MPI (collective); it cannot be used afterwards."""
    MPI = load()
    MPI.Finalize()


def world_place() -> tuple[int, int, bool]:
    """Return rank and size in MPI's world, and whether any thread may call MPI (initialises MPI)."""
    MPI = load()
    world = MPI.COMM_WORLD
    return world.Get_rank(), world.Get_size(), MPI.Query_thread() >= MPI.THREAD_MULTIPLE


def from_all(value: object) -> list[Any]:
    """Gather a value from each rank of MPI's world (collective; naps while it waits)."""
    MPI = load()
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(LONGEST_NAP_S)
    gathered: list[Any] = MPI.COMM_WORLD.allgather(value)
    return gathered
