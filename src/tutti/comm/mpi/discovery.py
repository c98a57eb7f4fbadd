"""The discovery of the ranks that share a host's memory.

Ranks with equal keys are on one host. The lowest of these offers an arena, which the others open through
/proc.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import HostGroup, control_bytes
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import UserError

Gather = Callable[[str], list[str]]
"""Gathers a text of each rank, in rank order."""


def host_key() -> str:
    """Return a text that is equal for processes that share memory: same kernel, process view and name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def join_host(
    rank: int, keys: Sequence[str], gather: Gather, global_ranks: Sequence[int]
) -> tuple[HostGroup, list[list[int]]]:
    """Join the ranks of this host (collective over all ranks), which have equal `keys`.

    Return them, and the members of all hosts, in the order of their lowest ranks. UserError: the ranks of a
    host cannot share memory.
    """
    hosts = [[other for other, key in enumerate(keys) if key == here] for here in dict.fromkeys(keys)]
    members = next(ranks for ranks in hosts if rank in ranks)
    leader, why = members[0], ""
    arena = Arena.create() if leader == rank else None
    offers = gather("" if arena is None else str(arena.address))
    if arena is not None:
        arena.allocate(control_bytes(len(members)))
    else:
        try:
            arena = Arena.open(FileAddress.parse(offers[leader]))
        except (OSError, ValueError) as error:
            why = str(error)
    failures = gather(why)
    failed = next((other for other, failure in enumerate(failures) if failure), None)
    if failed is not None:
        if arena is not None:
            arena.close()
        raise UserError(
            f"rank {failed} cannot open the shared memory of its host: {failures[failed]}; start all ranks "
            "of a host as one user, in one container"
        )
    assert arena is not None, "no rank has failed"
    named = [global_ranks[member] for member in members]
    return HostGroup(arena, FIRST, members.index(rank), named), hosts
