"""The variables from which torch.distributed, and what builds on it, learn a process's place (`env://`)."""

from __future__ import annotations

import atexit
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from tutti.errors import UserError
from tutti.launch.arena_handover import shared_file
from tutti.launch.first_rank import find_first_rank
from tutti.launch.launcher import LaunchContext, mpi_place

LOOPBACK: Final = "127.0.0.1"
_JOB_NAMES: Final = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_ID", "OMPI_MCA_ess_base_jobid")
_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS: Final = range(20_000, 32_000)
"""Below those that systems give to whoever asks for any."""


def variables(place: LaunchContext, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set.

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
) -> LaunchContext | None:
    """Under mpirun or srun, set what torch needs and nobody has set; else do nothing.

    Inside one host the port follows from the job's name, as the ranks need not talk. With several hosts the
    address is that of the first in Slurm's list; under mpirun the ranks find it out together.

    Args:
        environ: what is read and set.
        find: called on all ranks, with their number and, on rank 0, a free port; finds rank 0's address
            and port.

    Returns:
        This process's place, where all was left to us; None where somebody has said where the ranks meet.

    Raises:
        UserError: this rank reaches rank 0 nowhere.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    try:
        place = mpi_place(environ)
    except UserError:
        # Whoever starts something in parallel is told; an import is no place for it.
        return None
    if place is None:
        return None
    told = "MASTER_ADDR" in environ
    port = _PORTS[zlib.crc32(_job(environ).encode()) % len(_PORTS)]
    address = LOOPBACK if place.local_size == place.size else _first_of_slurm(environ)
    if not address and "MASTER_ADDR" not in environ:
        # Rank 0's is the one that counts. It is reserved as long as the process lives.
        free = 0 if place.rank else _until_exit.enter_context(reserved_port())
        address, port = find(place.size, free) or (address, port)
    for name, value in variables(place, address, port).items():
        if value:
            environ.setdefault(name, value)
    return None if told else place


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the ranks of a job that is on one host.

    Attributes:
        process: this one; a fork of it is no rank.
        file: the descriptor of the store's file.
        variables: what the environment said then; if it has changed since, the user wants another rendezvous.
    """

    process: int
    file: int
    variables: dict[str, str]


_rendezvous: Rendezvous | None = None
_until_exit: Final = ExitStack()
atexit.register(_until_exit.close)


def set_rendezvous_file(file: int, environ: Mapping[str, str] = os.environ) -> None:
    """Have this process, a rank as `environ` says, use the store in a file for its rendezvous."""
    global _rendezvous
    _rendezvous = Rendezvous(os.getpid(), file, {name: environ.get(name, "") for name in _VARIABLES})


def rendezvous_file(timeout_s: float) -> int | None:
    """Describe this rank to torch, if it is one and nobody has, and find the ranks' rendezvous (collective).

    Args:
        timeout_s: how long to wait for rank 0.

    Returns:
        The descriptor of the store's file; None: the rendezvous is where the environment says.

    Raises:
        UserError: this rank reaches rank 0 nowhere.
        PeerLost: rank 0 did not come.
    """
    place = describe_mpi_rank()
    if place is not None and place.local_size == place.size:
        set_rendezvous_file(shared_file(_job(os.environ), place.rank, place.size, timeout_s))
    if _rendezvous is None or _rendezvous.process != os.getpid():
        return None
    changed = any(os.environ.get(name, "") != value for name, value in _rendezvous.variables.items())
    return None if changed else _rendezvous.file


def _job(environ: Mapping[str, str]) -> str:
    """Return the names that tell a job of this user from all others."""
    return " ".join(environ.get(name, "") for name in (*_JOB_NAMES, "SLURM_STEP_ID"))


def _first_of_slurm(environ: Mapping[str, str]) -> str:
    """The first host of a list such as "gpu[03-07,12],cpu1"; nothing if there is none."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # Commas inside of brackets do not end a name, and a name may have several pairs of them.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


@contextmanager
def reserved_port(interface: str = "") -> Iterator[int]:
    """Yield a port of an interface (by default of all) that the system gives to no other who asks for any.

    A socket is bound to it that does not listen: so torch can listen there, as its stores set SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((interface, 0))
        yield int(holder.getsockname()[1])
