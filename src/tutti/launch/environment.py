"""The variables from which torch.distributed, and what builds on it, learn a process's place (`env://`)."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import MutableMapping
from typing import Final

from tutti.errors import UserError
from tutti.launch.surroundings import Surroundings, mpi_place

LOOPBACK: Final = "127.0.0.1"
_JOB_NAMES: Final = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_ID", "OMPI_MCA_ess_base_jobid")
_PORTS: Final = range(20_000, 32_000)
"""Below those that systems give to whoever asks for any."""


def variables(place: Surroundings, address: str, port: int) -> dict[str, str]:
    """What torchrun would set.

    Args:
        place: this process among those of the job.
        address: of the host of rank 0.
        port: one that is free there.
    """
    found = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.rank if place.local_rank is None else place.local_rank,
        "LOCAL_WORLD_SIZE": place.size if place.local_size is None else place.local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in found.items()}


def describe_mpi_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Under mpirun or srun, set what torch needs and nobody has set; else do nothing.

    The port follows from the job's name, as the ranks cannot talk yet. With several hosts the address is that
    of the first in Slurm's list, or is left to the user.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    try:
        place = mpi_place(environ)
    except UserError:
        # Whoever starts something in parallel is told; an import is no place for it.
        return
    if place is None:
        return
    job = " ".join(environ.get(name, "") for name in (*_JOB_NAMES, "SLURM_STEP_ID"))
    port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
    address = LOOPBACK if place.local_size == place.size else _first_of_slurm(environ)
    for name, value in variables(place, address, port).items():
        if value:
            environ.setdefault(name, value)


def _first_of_slurm(environ: MutableMapping[str, str]) -> str:
    """The first host of a list such as "gpu[03-07,12],cpu1"; nothing if there is none."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first, bracket, numbers = listed.partition(",")[0].partition("[")
    return first + numbers.strip("]").partition("-")[0] if bracket else first


def free_port() -> int:
    """A port of this host that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
