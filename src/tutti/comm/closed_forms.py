"""Closed forms: the seconds of collectives, as sums over rounds of messages that are under way at once.

The forms are those of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", Int. Journal of High Performance Computing Applications 19(1), 2005 (below: TRG):

    p  ranks      α  latency of a link in s      n  bytes of the whole vector      β  seconds per byte
    γ  seconds to add a byte to another

A message takes o of the processor at each end besides (A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman,
"LogGP", SPAA 1995); α stands for α + 2o. Where TRG give one algorithm for short and one for long vectors, the
cheaper one is charged, as MPI libraries choose. Where links differ, or are shared, a round takes as long as
its slowest message. Nearest partners exchange the longest parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from tutti.comm.topology import Hop, Link


@dataclass(frozen=True)
class Pairs:
    """A round of exchanges with the rank `distance` away: with 4, 0 and 4, 1 and 5, 2 and 6, 3 and 7."""

    distance: int

    def messages(self, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield senders and receivers."""
        return ((rank, rank ^ self.distance) for rank in range(ranks) if rank ^ self.distance < ranks)


@dataclass(frozen=True)
class Branches:
    """A round of a binomial tree: with distance 4, from 4 to 0; with 2, from 2 to 0 and from 6 to 4."""

    distance: int

    def messages(self, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield senders and receivers, up the tree."""
        parents = range(0, ranks - self.distance, 2 * self.distance)
        return ((parent + self.distance, parent) for parent in parents)


@dataclass(frozen=True)
class Rings:
    """A round in which each rank sends to the next of its ring.

    Args:
        length: how many ranks a ring has.
        stride: how far apart they are numbered. Rings of a stride lie between each other.
    """

    length: int
    stride: int = 1

    def messages(self, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield senders and receivers."""
        block = self.length * self.stride
        return ((rank, rank // block * block + (rank + self.stride) % block) for rank in range(ranks))


Round = Pairs | Branches | Rings


class Fabric(Protocol):
    """The links between some ranks."""

    def links(self, messages: Round, ranks: int) -> Mapping[Link, int]:
        """Return the links of a round's messages, each at its share of bandwidth, and their numbers."""


class Ways:
    """A fabric of messages that contend where they share a port.

    Args:
        route: the ports from one rank to another.
    """

    def __init__(self, route: Callable[[int, int], tuple[Hop, ...]]) -> None:
        self._route = route
        self._links: dict[tuple[Round, int], Mapping[Link, int]] = {}

    def links(self, messages: Round, ranks: int) -> Mapping[Link, int]:
        """As in `Fabric`."""
        key = messages, ranks
        if key not in self._links:
            ways = [self._route(*pair) for pair in messages.messages(ranks)]
            load: dict[object, float] = defaultdict(float)
            for way in ways:
                for hop in way:
                    load[hop.port] += hop.link.transfer_s(1)
            self._links[key] = Counter(_whole(way, max(load[hop.port] for hop in way)) for way in ways)
        return self._links[key]


def _whole(way: tuple[Hop, ...], seconds_per_byte: float) -> Link:
    """Return a way as one link."""
    latency = sum(hop.link.latency_s for hop in way)
    return Link(latency, 1 / seconds_per_byte if seconds_per_byte else inf, way[0].link.overhead_s)


def rounds(ranks: int) -> int:
    """The rounds of a tree over `ranks` ranks: ⌈log2 p⌉."""
    return (ranks - 1).bit_length()


def distances(ranks: int) -> list[int]:
    """The distances of these rounds: 1, 2, 4, ..."""
    return [1 << number for number in range(rounds(ranks))]


def round_s(fabric: Fabric, messages: Round, ranks: int, nbytes: float) -> float:
    """Seconds until the slowest message of a round is there: α + nβ."""
    return max((link.message_s(nbytes) for link in fabric.links(messages, ranks)), default=0.0)


def ring_s(fabric: Fabric, ring: Rings, ranks: int, nbytes: float, steps: int) -> float:
    """Seconds of `steps` messages of `nbytes` from each rank of a ring to the next: steps (α + nβ).

    A rank passes on what it has got. Where links differ, a part takes each link in turn, and the narrowest
    one carries all parts one after the other: the longer of both.
    """
    links = fabric.links(ring, ranks)
    if not links or ring.length == 1:
        return 0.0
    turn = sum(link.message_s(nbytes) * count for link, count in links.items()) / sum(links.values())
    return max(steps * turn, max(link.start_s + steps * link.transfer_s(nbytes) for link in links))


def barrier_s(fabric: Fabric, ranks: int) -> float:
    """Seconds of a barrier by dissemination: ⌈log2 p⌉ α (Hensgen, Finkel, Manber 1988)."""
    return sum(round_s(fabric, Pairs(distance), ranks, 0) for distance in distances(ranks))


def broadcast_s(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Seconds of a broadcast (TRG section 4.2).

    Short vectors by a binomial tree, ⌈log2 p⌉ (α + nβ); long ones by scatter and ring all-gather,
    (⌈log2 p⌉ + p - 1) α + 2 (p - 1)/p nβ.
    """
    tree = [Branches(distance) for distance in distances(ranks)]
    scattered = sum(
        round_s(fabric, branch, ranks, nbytes * min(branch.distance, ranks - branch.distance) / ranks)
        for branch in tree
    )
    return min(
        sum(round_s(fabric, branch, ranks, nbytes) for branch in tree),
        scattered + ring_s(fabric, Rings(ranks), ranks, nbytes / ranks, ranks - 1),
    )


def all_gather_s(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Seconds of an all-gather of `nbytes` in all.

    By recursive doubling, Bruck's algorithm or recursive halving, ⌈log2 p⌉ α + (p - 1)/p nβ (TRG sections 4.1
    and 4.3); or around a ring, (p - 1) α + (p - 1)/p nβ, which pays where links are shared.
    """
    parts = sorted(min(distance, ranks - distance) * nbytes / ranks for distance in distances(ranks))
    pairs = [Pairs(distance) for distance in reversed(distances(ranks))]
    return min(
        sum(round_s(fabric, pair, ranks, part) for pair, part in zip(pairs, parts, strict=True)),
        ring_s(fabric, Rings(ranks), ranks, nbytes / ranks, ranks - 1),
    )


def reduce_scatter_s(fabric: Fabric, ranks: int, nbytes: float, adding_s_per_byte: float = 0.0) -> float:
    """Seconds of a reduce-scatter: the way back of an all-gather, and (p - 1)/p nγ."""
    return all_gather_s(fabric, ranks, nbytes) + (ranks - 1) / ranks * nbytes * adding_s_per_byte


def all_reduce_s(fabric: Fabric, ranks: int, nbytes: float, adding_s_per_byte: float = 0.0) -> float:
    """Seconds until all have the sum (TRG section 4.5).

    Short vectors by recursive doubling, ⌈log2 p⌉ (α + nβ + nγ); long ones by Rabenseifner's algorithm
    (reduce-scatter, then all-gather), 2 ⌈log2 p⌉ α + 2 (p - 1)/p nβ + (p - 1)/p nγ. A ring moves as many
    bytes in more rounds.
    """
    doubling = sum(round_s(fabric, Pairs(distance), ranks, nbytes) for distance in distances(ranks))
    return min(
        doubling + rounds(ranks) * nbytes * adding_s_per_byte,
        all_gather_s(fabric, ranks, nbytes) + reduce_scatter_s(fabric, ranks, nbytes, adding_s_per_byte),
    )
