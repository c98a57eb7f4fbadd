"""The rendezvous of ranks that another launcher started, for torch.distributed and what builds on it.

These read a process's place from environment variables (`env://`), which are set here if the launcher has
not set them:

one host        no address is needed: all ranks get one anonymous file, and torch's store is in that.

                rank 0   creates it, listens on a Unix socket named after the job ──descriptor──▶ the others

                The socket is in the abstract namespace, so that no file is left behind. The kernel tells each
                side which user owns the process at the other end: other users get nothing, and nothing is
                accepted from them.

several hosts   Slurm lists them. Else rank 0 broadcasts the first of its addresses by MPI; if the others
                cannot reach it, the user sets MASTER_ADDR.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from tutti.comm.shm import memfd
from tutti.errors import PeerLost, UserError
from tutti.launch.allocation import expand_nodes
from tutti.launch.launcher import LaunchContext, mpi_place
from tutti.launch.orphans import follow_launcher, refuse_ended_launcher
from tutti.launch.placement import own_addresses

LOOPBACK: Final = "127.0.0.1"
_JOB_NAMES: Final = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_ID", "OMPI_MCA_ess_base_jobid")
_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS: Final = range(20_000, 32_000)
"""Below the ports that systems choose themselves."""

CONNECT_S: Final = 2.0
"""Time of a rank to take the file."""

RETRY_S: Final = 0.01
"""Pause of a rank between two looks whether rank 0 is there."""

_CREDENTIALS: Final = struct.Struct("3i")


def find_first_rank(size: int, port: int) -> tuple[str, int] | None:
    """Return an address of rank 0's host, and a port that is free there (collective)."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    from tutti.comm.mpi.library import from_all, world_place

    _, found, _ = world_place()
    return from_all((own_addresses()[0], port))[0] if found == size else None


def variables(place: LaunchContext, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set: address and port are those of rank 0's host."""
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
    """Under mpirun or srun, set what torch needs and is not set; else do nothing.

    Inside one host the port follows from the job's name, as the ranks need not talk. With several hosts the
    address is the first in Slurm's list; under mpirun the ranks find it out together. Return this process's
    place; None if the user has set where the ranks meet. UserError: its launcher has ended.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    try:
        place = mpi_place(environ)
    except UserError:
        # A parallel start raises it; an import is no place for it.
        return None
    if place is None:
        return None
    refuse_ended_launcher(environ)
    told = "MASTER_ADDR" in environ
    port = _PORTS[zlib.crc32(_job(environ).encode()) % len(_PORTS)]
    address = LOOPBACK if place.local_size == place.size else _first_of_slurm(environ)
    if not address and not told:
        # Only rank 0's port counts. It is reserved as long as the process lives: torch listens there later.
        free = 0 if place.rank else _until_exit.enter_context(reserved_port())
        address, port = find(place.size, free) or (address, port)
    for name, value in variables(place, address, port).items():
        if value:
            environ.setdefault(name, value)
    return None if told else place


_store: tuple[int, int, dict[str, str]] | None = None
"""The process (a fork of it is no rank), the store's file, and the variables that must not have changed."""

_until_exit: Final = ExitStack()
atexit.register(_until_exit.close)


def set_rendezvous_file(file: int, environ: Mapping[str, str] = os.environ) -> None:
    """Make this process, a rank as `environ` says, use the store in a file for its rendezvous."""
    global _store
    _store = os.getpid(), file, {name: environ.get(name, "") for name in _VARIABLES}


def rendezvous_file(timeout_s: float) -> int | None:
    """Describe this rank to torch, and find the ranks' rendezvous (collective).

    Return the descriptor of the store's file; None: the rendezvous is in the environment. UserError: as of
    `shared_file`, or its launcher has ended. PeerLost: rank 0 did not come.
    """
    follow_launcher()
    place = describe_mpi_rank()
    if place is not None and place.local_size == place.size:
        set_rendezvous_file(shared_file(_job(os.environ), place.rank, place.size, timeout_s))
    if _store is None:
        return None
    process, file, variables_then = _store
    changed = any(os.environ.get(name, "") != value for name, value in variables_then.items())
    return None if changed or process != os.getpid() else file


def _job(environ: Mapping[str, str]) -> str:
    """Return names that distinguish a job of this user from all others."""
    return " ".join(environ.get(name, "") for name in (*_JOB_NAMES, "SLURM_STEP_ID"))


def _first_of_slurm(environ: Mapping[str, str]) -> str:
    """Return the first host of a list such as "gpu[03-07,12],cpu1"; empty if there is none."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return expand_nodes(listed)[0] if listed else ""


@contextmanager
def reserved_port(interface: str = "") -> Iterator[int]:
    """Yield a port of an interface (by default of all) that the system gives to no other process."""
    # It is bound but does not listen, so torch can listen there: its stores set SO_REUSEADDR.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((interface, 0))
        yield int(holder.getsockname()[1])


def shared_file(job_name: str, rank: int, size: int, timeout_s: float) -> int:
    """Return a descriptor of the anonymous file that all ranks of a job on this host share (collective).

    UserError: the socket's name is taken, or belongs to another user. PeerLost: rank 0 did not come.
    """
    name = "\0tutti-" + hashlib.sha256(f"{os.geteuid()} {job_name}".encode()).hexdigest()
    if rank == 0:
        file = memfd.make("store")
        _offer(name, file, size - 1)
        return file
    return _take(name, timeout_s)


def _offer(name: str, file: int, others: int) -> None:
    """Hand the file to `others` processes of this user, in a thread."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(name)
    except OSError as error:
        server.close()
        raise UserError(
            "another process of this host has the name under which the ranks of this job would meet; start "
            "one job after the other, or say where they are to meet: MASTER_ADDR and MASTER_PORT"
        ) from error
    server.listen(others)

    def serve() -> None:
        left = others
        with server:
            while left:
                connection, _ = server.accept()
                # A rank that was interrupted connects again.
                with connection, suppress(OSError):
                    if _user_of(connection) == os.geteuid():
                        connection.settimeout(CONNECT_S)
                        socket.send_fds(connection, [b"."], [file])
                        left -= 1

    threading.Thread(target=serve, name="tutti-handing", daemon=True).start()


def _user_of(connection: socket.socket) -> int:
    """Return the user number of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _take(name: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
            try:
                connection.connect(name)
                if _user_of(connection) != os.geteuid():
                    raise UserError(
                        f"user {_user_of(connection)} has taken the name under which the ranks of this job "
                        "would meet; say where they are to meet: MASTER_ADDR and MASTER_PORT"
                    )
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
            except OSError:
                time.sleep(RETRY_S)
                continue
        if files:
            os.set_inheritable(files[0], False)
            memfd.check(files[0])
            return files[0]
    raise PeerLost([0], f"it did not come within {timeout_s:g} s")
