"""The variables from which torch.distributed, and what builds on it, learn a process's place (`env://`)."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

from tutti.errors import UserError
from tutti.launch.first_rank import find_first_rank
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


def describe_mpi_rank(
    environ: MutableMapping[str, str] = os.environ,
    find: Callable[[int, int], tuple[str, int] | None] = find_first_rank,
) -> None:
    """Under mpirun or srun, set what torch needs and nobody has set; else do nothing.

    Inside one host the port follows from the job's name, as the ranks need not talk. With several hosts the
    address is that of the first in Slurm's list; under mpirun the ranks find it out together.

    Args:
        environ: what is read and set.
        find: called on all ranks, with their number and a free port, to find rank 0's address and port.

    Raises:
        UserError: this rank reaches rank 0 nowhere.
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
    if not address and "MASTER_ADDR" not in environ:
        address, port = find(place.size, free_port()) or (address, port)
    for name, value in variables(place, address, port).items():
        if value:
            environ.setdefault(name, value)


def _first_of_slurm(environ: Mapping[str, str]) -> str:
    """The first host of a list such as "gpu[03-07,12],cpu1"; nothing if there is none."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # Commas inside of brackets do not end a name, and a name may have several pairs of them.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def free_port() -> int:
    """A port of this host that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
