"""The rendezvous of a group's ranks: through the store that torch gives them, then in shared memory.

    rank 0   store: host, arena ──┐                          ┌── all could open it ──▶ go on
    rank 1   store: host ─────────┴ opens /proc/PID/fd/N ────┴── somebody could not ─▶ all say so

On one host the store is in an anonymous file (`tutti.comm.shm.memfd`). torch's TCPStore listens on all
interfaces, whatever host it is given, and authenticates nobody. An anonymous file of this user needs no port,
and nothing of it is left behind.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
)

from tutti.comm.mpi.barrier import host_state_bytes
from tutti.comm.mpi.communicator import group_of, world_place
from tutti.comm.mpi.group import MpiGroup
from tutti.comm.shm.arena import FIRST, PAGE, Arena
from tutti.comm.shm.layout import control_bytes
from tutti.comm.shm.memfd import FileAddress
from tutti.torch_backend.errors import Absent, Unusable


def store_in(descriptor: int, size: int) -> FileStore:
    """Open the store in a file.

    Args:
        descriptor: of the file; to be kept open, as C++ may use the store for as long as the process lives.
        size: the number of ranks that meet there.
    """
    return FileStore(f"/proc/self/fd/{descriptor}", size)


_FINE = "fine"
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID")
_TAGS = 16_000


class HostMemory(NamedTuple):
    """The memory of a group on one host: the offsets in it of its control block and state."""

    arena: Arena
    block: int
    state: int


class GroupStore:
    """The values that the ranks of a group exchange through a store, while the group is made.

    A store may outlive a group (torchrun keeps its own), and the next group may have the same name: each
    generation of a group has keys of its own.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self.generation = store.add(f"generation/{rank}", 1)
        self._store = PrefixStore(f"tutti/{self.generation}", store)
        self._rank, self._names = rank, tuple(names)
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s

    def tell(self, what: str, value: str) -> None:
        """Publish a value of this rank."""
        self._store.set(f"{what}/{self._rank}", value)

    def ask(self, what: str, rank: int) -> str:
        """Wait for a value of a rank.

        Raises:
            Absent: it did not publish it in time.
        """
        left_s = max(0.001, self._deadline - time.monotonic())
        key = f"{what}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except RuntimeError as error:
            if time.monotonic() < self._deadline:
                raise
            raise Absent("init_process_group", [self._names[rank]], self._timeout_s) from error
        found: bytes = self._store.get(key)
        return found.decode()

    def gather(self, what: str, value: str) -> list[str]:
        """Publish a value, and wait for those of all ranks, in rank order."""
        self.tell(what, value)
        return [self.ask(what, rank) for rank in range(len(self._names))]


def host_key() -> str:
    """Equal for processes that can share memory: one kernel, one view of its processes, one name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def share(group_store: GroupStore, rank: int, size: int, members: Sequence[int]) -> HostMemory:
    """Make or open the shared memory of the ranks of one host (collective over the group).

    Args:
        group_store: of the group.
        rank: this process's number in the group.
        size: how many ranks the group has.
        members: the group's ranks on this host.

    Raises:
        Unusable: a rank cannot open the memory of another one.
        Absent: a rank did not come.
    """
    local_size, leader, outcome = len(members), members[0], _FINE
    # All ranks compute the offsets alike: the store, which others may write to, has none.
    block, state = FIRST, FIRST + -(-control_bytes(local_size) // PAGE) * PAGE
    if rank == leader:
        arena = Arena.create()
        arena.allocate(state + host_state_bytes(local_size, size) - FIRST)
        group_store.tell("arena", str(arena.address))
    else:
        try:
            arena = Arena.open(FileAddress.parse(group_store.ask("arena", leader)))
        except (OSError, ValueError) as error:
            arena, outcome = Arena.create(), str(error)
    outcomes = group_store.gather("opened", outcome)
    for other, said in enumerate(outcomes):
        if said != _FINE:
            arena.close()
            raise Unusable(
                f"rank {other} cannot open the shared memory of its host: {said}; start all ranks of a host "
                "as one user, in one container"
            )
    return HostMemory(arena, block, state)


def join_by_mpi(group_store: GroupStore, names: Sequence[int], hosts: Sequence[str]) -> MpiGroup:
    """Make the MPI communicators of ranks on several hosts (collective).

    Args:
        group_store: of the group.
        names: the ranks' numbers in the job.
        hosts: a name of the host of each rank.

    Raises:
        Unusable: MPI did not start the ranks.
    """
    places = group_store.gather("mpi", _mpi_place(len(names)))
    for name, host, place in zip(names, hosts, places, strict=True):
        if not place.isdecimal():
            raise Unusable(
                f"the ranks are on several hosts ({', '.join(sorted(set(hosts)))}), and rank {name} on "
                f"{host} cannot reach the others with MPI: {place}. Start them all with the mpirun of the "
                "MPI library that mpi4py uses, or take the backend gloo"
            )
    tag = zlib.crc32(f"{group_store.generation} {names}".encode()) % _TAGS
    return group_of([int(place) for place in places], tag)


def _mpi_place(size: int) -> str:
    """Return this process's rank in MPI's world, or the reason why MPI cannot be used."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return "it was not started by mpirun or srun"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is missing; install it with: pip install 'tutti[mpi]'"
    rank, found, threads = world_place()
    if found < size:
        return f"MPI sees {found} of {size} ranks: the launcher belongs to another MPI library"
    if not threads:
        return "the MPI library was built without MPI_THREAD_MULTIPLE"
    return str(rank)
