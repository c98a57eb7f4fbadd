"""The discovery of the ranks that share a host's memory, when MPI started them.

MPI says which of the ranks seem to be on one host. The lowest of these offers an arena; a rank that can open
it through /proc and finds the secret word in it is on that host. Those that cannot (they run in a container
of their own) try again among themselves, until each rank has a host.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.comm.shm.arena import Arena
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.layout import HostGroup, control_bytes
from tutti.comm.shm.memfd import FileAddress

Gather = Callable[[object], list[object]]
"""Gathers one picklable value of each rank of the job, in rank order."""


@dataclass(frozen=True)
class ArenaOffer:
    """An arena that other ranks may open; its word at `offset` is `secret`."""

    address: FileAddress
    offset: int
    secret: int


def join_host(rank: int, host: object, gather: Gather) -> tuple[HostCommunicator, list[list[int]]]:
    """Join the ranks of this host (collective over the job).

    Args:
        rank: this process's number in the job.
        host: equal on ranks that seem to be on one host.
        gather: gathers one value of each rank of the job.

    Returns:
        The communicator of this host, and the members of all hosts by their numbers in the job. The hosts are
        in the order of their lowest ranks, and their members in order.
    """
    claims = gather(host)
    homeless = list(range(len(claims)))
    hosts: list[list[int]] = []
    mine: Arena | None = None
    while homeless:
        leader = _leader(rank, claims, homeless)
        arena, offer = _offer() if leader == rank else (None, None)
        offers = gather(offer)
        if leader is not None and leader != rank:
            arena = _accept(offers[leader])
        mine = mine or arena
        found = gather(leader if arena else None)
        hosts += [[r for r, home in enumerate(found) if home == first] for first in {*found} - {None}]
        homeless = [r for r in homeless if found[r] is None]
    return _assemble(rank, mine, sorted(hosts), gather), sorted(hosts)


def _leader(rank: int, claims: Sequence[object], homeless: Sequence[int]) -> int | None:
    """The lowest rank without a host that claims to be where `rank` is; None if that has a host already."""
    return min(r for r in homeless if claims[r] == claims[rank]) if rank in homeless else None


def _assemble(rank: int, arena: Arena | None, hosts: list[list[int]], gather: Gather) -> HostCommunicator:
    members = next(ranks for ranks in hosts if rank in ranks)
    assert arena is not None, "a rank in a list of hosts has opened its arena"
    blocks = gather(arena.allocate(control_bytes(len(members))) if rank == members[0] else None)
    block = blocks[members[0]]
    assert isinstance(block, int), "the lowest rank of a host tells where its control block is"
    return HostCommunicator(HostGroup(arena, block, members.index(rank), members))


def _offer() -> tuple[Arena, ArenaOffer]:
    arena = Arena.create()
    offset, secret = arena.allocate(8), secrets.randbits(62)
    arena.words(offset, 1)[0] = secret
    return arena, ArenaOffer(arena.address, offset, secret)


def _accept(offer: object) -> Arena | None:
    """The offered arena, or None if this process cannot reach it."""
    if not isinstance(offer, ArenaOffer):
        return None
    try:
        arena = Arena.open(offer.address)
    except (OSError, ValueError):
        return None
    if arena.words(offer.offset, 1)[0] == offer.secret:
        return arena
    arena.close()
    return None
