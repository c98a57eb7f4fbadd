"""Rounds of simultaneous messages, the parts of a collective, and their seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf

from tutti.comm.topology import Hop, Link


@dataclass(frozen=True)
class Pairs:
    """Exchanges with the rank `distance` away: with 4, of 0 and 4, 1 and 5, 2 and 6, 3 and 7."""

    distance: int


@dataclass(frozen=True)
class Branches:
    """One level of a binomial tree: with distance 4, from 4 to 0; with 2, from 2 to 0 and from 6 to 4."""

    distance: int


@dataclass(frozen=True)
class Rings:
    """From each rank to the next of its ring. A ring has `length` ranks, numbered `stride` apart."""

    length: int
    stride: int = 1


Round = Pairs | Branches | Rings


def messages(kind: Round, ranks: int) -> Iterator[tuple[int, int]]:
    """Return the senders and receivers of a round."""
    if isinstance(kind, Pairs):
        return ((rank, rank ^ kind.distance) for rank in range(ranks) if rank ^ kind.distance < ranks)
    if isinstance(kind, Branches):
        parents = range(0, ranks - kind.distance, 2 * kind.distance)
        return ((parent + kind.distance, parent) for parent in parents)
    block = kind.length * kind.stride
    return ((rank, rank // block * block + (rank + kind.stride) % block) for rank in range(ranks))


class Contended:
    """The links between ranks whose messages contend where they share a port."""

    def __init__(self, route: Callable[[int, int], tuple[Hop, ...]]) -> None:
        self._route = route
        self._links: dict[Hashable, Mapping[Link, int]] = {}

    def links(self, kind: Round, ranks: int) -> Mapping[Link, int]:
        """Return the links of a round's messages, each at its share of bandwidth, and their numbers."""
        if (kind, ranks) not in self._links:
            ways = [self._route(*pair) for pair in messages(kind, ranks)]
            load: dict[Hashable, float] = defaultdict(float)
            for hop in (hop for way in ways for hop in way):
                load[hop.port] += hop.link.transfer_s(1)
            self._links[kind, ranks] = Counter(_as_link(way, load) for way in ways)
        return self._links[kind, ranks]


def _as_link(way: tuple[Hop, ...], load: Mapping[Hashable, float]) -> Link:
    seconds_per_byte = max(load[hop.port] for hop in way)
    latency = sum(hop.link.latency_s for hop in way)
    return Link(latency, 1 / seconds_per_byte if seconds_per_byte else inf, way[0].link.overhead_s)


Fabric = Link | Contended
"""The links between some ranks; a `Link`: each rank has one of this kind."""


def links(fabric: Fabric, kind: Round, ranks: int) -> Mapping[Link, int]:
    """Return the links of a round's messages, and their numbers."""
    return {fabric: 1} if isinstance(fabric, Link) else fabric.links(kind, ranks)


def round_s(fabric: Fabric, kind: Round, ranks: int, nbytes: float) -> float:
    """Seconds until the slowest message of a round is there: α + nβ."""
    return max((link.message_s(nbytes) for link in links(fabric, kind, ranks)), default=0.0)


def ring_s(fabric: Fabric, ring: Rings, ranks: int, nbytes: float, steps: int) -> float:
    """Seconds of `steps` messages of `nbytes` from each rank of a ring to the next: steps (α + nβ).

    A rank passes on what it has got. Where links differ, a part takes each kind of link in turn, and the
    narrowest link carries all parts one after the other: the longer of both.
    """
    found, passed, left = links(fabric, ring, ranks), 0.0, steps
    for link in sorted(found, key=lambda link: link.message_s(nbytes), reverse=True):
        times = min(left, ceil(steps * found[link] / sum(found.values())))
        passed += times * link.message_s(nbytes)
        left -= times
    narrowest = (link.message_s(0) + steps * link.transfer_s(nbytes) for link in found if steps)
    return max(passed, *narrowest, 0.0)
