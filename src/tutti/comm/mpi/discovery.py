"""The discovery of the ranks that share a host's memory.

Ranks with equal keys seem to be on one host. The lowest of these offers an arena; a rank that can open it
through /proc and finds the secret word in it is on that host. Those that cannot (they run in a container of
their own) try again among themselves, until each rank has a host.

What ranks tell each other here is text, as other users may be able to write to where it passes through: the
address of an arena is looked at before it is mapped, and offsets are computed by all ranks alike.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tutti.comm.shm.arena import FIRST, PAGE, Arena
from tutti.comm.shm.layout import HostGroup, control_bytes
from tutti.comm.shm.memfd import FileAddress

Gather = Callable[[str], list[str]]
"""Gathers a text of each rank, in rank order."""

BLOCK: Final = FIRST + PAGE
"""The offset of the control block in an arena whose first page holds the secret word."""


def host_key() -> str:
    """Equal for processes that can share memory: one kernel, one view of its processes, one name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def join_host(
    rank: int,
    keys: Sequence[str],
    gather: Gather,
    global_ranks: Sequence[int],
    mismatch: type[Exception] = ValueError,
    unusable: type[Exception] | None = None,
) -> tuple[HostGroup, list[list[int]]]:
    """Join the ranks of this host (collective over all ranks).

    Args:
        rank: this process's number.
        keys: of all ranks; equal on those that seem to be on one host.
        gather: gathers a text of each rank.
        global_ranks: the ranks' numbers in the job.
        mismatch: as in `HostGroup`.
        unusable: the error that ranks with one key cannot share memory; None: they are on several hosts.

    Returns:
        The ranks of this host, and the members of all hosts by their numbers. The hosts are in the order of
        their lowest ranks, and their members in order.
    """
    homeless = list(range(len(keys)))
    hosts: list[list[int]] = []
    mine: Arena | None = None
    while homeless:
        leader = min(other for other in homeless if keys[other] == keys[rank]) if rank in homeless else None
        arena, offer, outcome = None, "", ""
        if leader == rank:
            arena, offer = _offer()
        offers = gather(offer)
        if leader is not None and leader != rank:
            try:
                arena = _accept(offers[leader])
            except (OSError, ValueError) as error:
                outcome = str(error)
        mine = mine or arena
        found = gather(f"{leader}" if arena else outcome)
        joined = [other for other in homeless if found[other].isdecimal()]
        hosts += [
            [other for other in joined if found[other] == first]
            for first in dict.fromkeys(found[other] for other in joined)
        ]
        homeless = [other for other in homeless if other not in joined]
        if homeless and unusable is not None:
            if mine is not None:
                mine.close()
            raise unusable(
                f"rank {homeless[0]} cannot open the shared memory of its host: {found[homeless[0]]}; start "
                "all ranks of a host as one user, in one container"
            )
    members = next(ranks for ranks in hosts if rank in ranks)
    assert mine is not None, "a rank in a list of hosts has opened its arena"
    if rank == members[0]:
        # Nobody else allocates before this rank has come to the group.
        mine.allocate(control_bytes(len(members)))
    named = [global_ranks[member] for member in members]
    return HostGroup(mine, BLOCK, members.index(rank), named, mismatch), sorted(hosts)


def _offer() -> tuple[Arena, str]:
    """A new arena, and the text by which others open it."""
    arena = Arena.create()
    secret = secrets.randbits(62)
    arena.words(arena.allocate(8), 1)[0] = secret
    return arena, f"{arena.address} {secret}"


def _accept(offer: str) -> Arena:
    """The offered arena.

    Raises:
        OSError: this process cannot reach it.
        ValueError: it is something else.
    """
    address, _, secret = offer.rpartition(" ")
    arena = Arena.open(FileAddress.parse(address))
    if secret == str(arena.words(FIRST, 1)[0]):
        return arena
    arena.close()
    raise ValueError("it is another arena")
