"""The rendezvous of a group's ranks, through torch's store.

On one host the store is in an anonymous file (`tutti.comm.shm.memfd`). torch's TCPStore listens on all
interfaces, even for a given host, and has no authentication. An anonymous file of this user needs no port,
and leaves nothing behind.
"""

from __future__ import annotations

import importlib.util
import os
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from tutti.comm.mpi.discovery import host_key, join_host
from tutti.comm.mpi.group import MpiGroup
from tutti.comm.mpi.library import world_place
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.liveness import LONGEST_NAP_S
from tutti.errors import PeerLost, UserError
from tutti.torch_backend.errors import Absent, Unusable

_LONGEST_STORE_NAP_S: Final = 0.01
"""Pause between two looks of a rank into the store; torch's own wait in a file has the same."""

MEET_S: Final = 300.0
"""How long the ranks of torchrun may take to come, as each imports torch first."""

_stores: Final[list[Store]] = []
"""Rank 0 may be the one that serves the store: it is kept as long as the process lives."""

_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID")
_TAGS = 16_000


class GroupStore:
    """The values that the ranks of a group exchange through a store, while the group is made.

    A store may outlive a group (torchrun keeps its own), and the next group may have the same name: each
    generation of a group has its own keys. `check` raises PeerLost if a rank of the job will not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        check: Callable[[int], None],
    ) -> None:
        self.generation = store.add(f"generation/{rank}", 1)
        self._store = PrefixStore(f"tutti/{self.generation}", store)
        self._rank, self._global_ranks = rank, tuple(global_ranks)
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s, self._check, self._gathered = timeout_s, check, 0

    def gather(self, value: str) -> list[str]:
        """Return the values of all ranks. Absent: one did not come in time. PeerLost: it never will."""
        self._gathered += 1
        self._store.set(f"{self._gathered}/{self._rank}", value)
        return [self._wait_for(rank) for rank in range(len(self._global_ranks))]

    def _wait_for(self, rank: int) -> str:
        key, nap_s = f"{self._gathered}/{rank}", LONGEST_NAP_S
        while not self._store.check([key]):
            try:
                self._check(self._global_ranks[rank])
            except PeerLost:
                # It may have published this just before it left.
                if self._store.check([key]):
                    break
                raise
            if time.monotonic() >= self._deadline:
                raise Absent("init_process_group", [self._global_ranks[rank]], self._timeout_s)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_STORE_NAP_S)
        value: bytes = self._store.get(key)
        return value.decode()


def join_by_store(rank: int, size: int) -> HostCommunicator:
    """Join the ranks of one host that torchrun has started (collective)."""
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=MEET_S)))
    _stores.append(store)
    meeting = GroupStore(PrefixStore("tutti-world", store), rank, range(size), MEET_S, lambda rank: None)
    keys = meeting.gather(host_key())
    group, hosts = join_host(rank, keys, meeting.gather, range(size))
    if len(hosts) > 1:
        names = ", ".join(dict.fromkeys(key.split()[0] for key in keys))
        raise UserError(
            f"torchrun has started ranks on several hosts ({names}), which tutti joins by MPI; start them "
            "with mpirun or srun, or without a launcher by --hosts"
        )
    return HostCommunicator(group)


def join_by_mpi(group_store: GroupStore, global_ranks: Sequence[int], keys: Sequence[str]) -> MpiGroup:
    """Make the MPI communicators of ranks on several hosts (collective).

    `keys` identify each rank's host, and begin with its name. Unusable: MPI did not start the ranks.
    """
    hosts = [key.split()[0] for key in keys]
    places = group_store.gather(_mpi_place(len(global_ranks)))
    for name, host, place in zip(global_ranks, hosts, places, strict=True):
        if not place.isdecimal():
            raise Unusable(
                f"the ranks are on several hosts ({', '.join(sorted(set(hosts)))}), and rank {name} on "
                f"{host} cannot reach the others with MPI: {place}. Start them all with the mpirun of the "
                "MPI library that mpi4py uses, or take the backend gloo"
            )
    tag = zlib.crc32(f"{group_store.generation} {global_ranks}".encode()) % _TAGS
    return MpiGroup([int(place) for place in places], tag)


def _mpi_place(size: int) -> str:
    """Return this process's rank in MPI's world, or why MPI cannot be used."""
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
