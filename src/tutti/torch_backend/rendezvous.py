"""The rendezvous of a group's ranks: through the store that torch gives them, then in shared memory.

    rank 0   store: host, arena ──┐                          ┌── all could open it ──▶ go on
    rank 1   store: host ─────────┴ opens /proc/PID/fd/N ────┴── somebody could not ─▶ all say so

On one host the store is in an anonymous file (`tutti.comm.shm.memfd`). torch's TCPStore listens on all
interfaces, whatever host it is given, and asks nobody who they are. A file of this user without a name needs
no port, and nothing of it is left behind.
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

from tutti.comm.mpi.communicator import group_of, world_place
from tutti.comm.mpi.group import MpiGroup
from tutti.comm.shm.arena import FIRST, PAGE, Arena
from tutti.comm.shm.layout import ControlLayout, control_bytes
from tutti.comm.shm.memfd import FileAddress
from tutti.torch_backend.errors import Absent, Unusable
from tutti.torch_backend.host_state import board_bytes


def store_in(descriptor: int, size: int) -> FileStore:
    """The store in a file.

    Args:
        descriptor: of the file; to be kept open, as C++ may use the store for as long as the process lives.
        size: how many ranks meet there.
    """
    return FileStore(f"/proc/self/fd/{descriptor}", size)


_FINE = "fine"
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID")
_TAGS = 16_000


class Place(NamedTuple):
    """Where a group's shared memory is: its control block, its board, and the words of the block."""

    arena: Arena
    block: int
    board: int
    words: memoryview


class Registry:
    """What the ranks of a group tell each other through a store.

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
        """Say something to the others."""
        self._store.set(f"{what}/{self._rank}", value)

    def ask(self, what: str, rank: int) -> str:
        """What a rank says; waits for it.

        Raises:
            Absent: it did not say so in time.
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
        """What each rank says, in rank order."""
        self.tell(what, value)
        return [self.ask(what, rank) for rank in range(len(self._names))]


def host_key() -> str:
    """Equal for processes that can share memory: one kernel, one view of its processes, one name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def share(registry: Registry, rank: int, size: int, members: Sequence[int]) -> Place:
    """Make, or find, the shared memory of the ranks of one host (collective over the group).

    Args:
        registry: of the group.
        rank: this process's number in the group.
        size: how many ranks the group has.
        members: the group's ranks on this host.

    Raises:
        Unusable: a rank cannot open what another one made.
        Absent: a rank did not come.
    """
    local_size, leader, outcome = len(members), members[0], _FINE
    # Where things lie is known to all: the store, which others may write to, says nothing about it.
    block, board = FIRST, FIRST + -(-control_bytes(local_size) // PAGE) * PAGE
    if rank == leader:
        arena = Arena.create()
        arena.allocate(board + board_bytes(local_size, size) - FIRST)
        registry.tell("arena", str(arena.address))
    else:
        try:
            arena = Arena.open(FileAddress.parse(registry.ask("arena", leader)))
        except (OSError, ValueError) as error:
            arena, outcome = Arena.create(), str(error)
    outcomes = registry.gather("opened", outcome)
    for other, said in enumerate(outcomes):
        if said != _FINE:
            arena.close()
            raise Unusable(
                f"rank {other} cannot open the shared memory of its host: {said}; start all ranks of a host "
                "as one user, in one container"
            )
    return Place(arena, block, board, arena.words(block, ControlLayout(local_size).words))


def join_by_mpi(registry: Registry, names: Sequence[int], hosts: Sequence[str]) -> MpiGroup:
    """MPI communicators for ranks on several hosts (collective).

    Args:
        registry: of the group.
        names: the ranks' numbers in the job.
        hosts: a name of the host of each rank.

    Raises:
        Unusable: MPI did not start the ranks.
    """
    places = registry.gather("mpi", _mpi_place(len(names)))
    for name, host, place in zip(names, hosts, places, strict=True):
        if not place.isdecimal():
            raise Unusable(
                f"the ranks are on several hosts ({', '.join(sorted(set(hosts)))}), and rank {name} on "
                f"{host} cannot reach the others with MPI: {place}. Start them all with the mpirun of the "
                "MPI library that mpi4py uses, or take the backend gloo"
            )
    tag = zlib.crc32(f"{registry.generation} {names}".encode()) % _TAGS
    return group_of([int(place) for place in places], tag)


def _mpi_place(size: int) -> str:
    """Which rank this process is in MPI's world, or why it is none that is of use."""
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
