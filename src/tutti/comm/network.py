"""The cost of communication: latency + bytes / bandwidth for a message, closed forms for collectives.

The forms come from R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", Int. Journal of High Performance Computing Applications 19(1), 2005 (below: TRG):

    p  ranks        α  latency of a link in s        n  bytes of the whole vector        β  seconds per byte
    γ  seconds to add a byte to another one

α includes the processor's overhead at both ends, 2o (A. Alexandrov et al., "LogGP", SPAA 1995). Where TRG
give one algorithm for short and one for long vectors, the cheaper of the two is charged, as MPI libraries
choose. Where links differ or are shared, a round takes as long as its slowest message, the nearest ranks
exchange the longest parts, and a ring is charged where it is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf

from typing_extensions import override

from tutti.comm.rounds import Branches, Contended, Fabric, Pairs, Rings, ring_s, round_s
from tutti.comm.topology import (
    BITS,
    TIMES,
    Hop,
    Link,
    Sites,
    Switch,
    Torus,
    in_units,
    parse_topology,
    quantity,
)


def rounds(ranks: int) -> int:
    """The rounds of a tree over `ranks` ranks: ⌈log2 p⌉."""
    return (ranks - 1).bit_length()


def distances(ranks: int) -> list[int]:
    """How far apart partners are in these rounds: 1, 2, 4, ..."""
    return [1 << number for number in range(rounds(ranks))]


@lru_cache(maxsize=1024)
def barrier_s(fabric: Fabric, ranks: int) -> float:
    """Seconds of a barrier by dissemination: ⌈log2 p⌉ α (Hensgen, Finkel, Manber 1988)."""
    return sum(round_s(fabric, Pairs(distance), ranks, 0) for distance in distances(ranks))


@lru_cache(maxsize=1024)
def broadcast_s(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Seconds of a broadcast (TRG section 4.2).

    Short vectors by a binomial tree, ⌈log2 p⌉ (α + nβ); long ones by scatter and ring all-gather,
    (⌈log2 p⌉ + p - 1) α + 2 (p - 1)/p nβ.
    """
    parts = {distance: min(distance, ranks - distance) * nbytes / ranks for distance in distances(ranks)}
    tree = sum(round_s(fabric, Branches(distance), ranks, nbytes) for distance in parts)
    scatter = sum(round_s(fabric, Branches(distance), ranks, part) for distance, part in parts.items())
    return min(tree, scatter + ring_s(fabric, Rings(ranks), ranks, nbytes / ranks, ranks - 1))


@lru_cache(maxsize=1024)
def all_gather_s(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Seconds of an all-gather of `nbytes` in all.

    By recursive doubling, Bruck's algorithm or recursive halving, ⌈log2 p⌉ α + (p - 1)/p nβ (TRG sections 4.1
    and 4.3); on shared links, perhaps by a ring, (p - 1) α + (p - 1)/p nβ.
    """
    far = distances(ranks)
    parts = sorted((min(distance, ranks - distance) * nbytes / ranks for distance in far), reverse=True)
    doubling = sum(
        round_s(fabric, Pairs(distance), ranks, part) for distance, part in zip(far, parts, strict=True)
    )
    return min(doubling, ring_s(fabric, Rings(ranks), ranks, nbytes / ranks, ranks - 1))


def reduce_scatter_s(fabric: Fabric, ranks: int, nbytes: float, adding_s_per_byte: float = 0.0) -> float:
    """Seconds of a reduce-scatter: the way back of an all-gather, and (p - 1)/p nγ."""
    return all_gather_s(fabric, ranks, nbytes) + (ranks - 1) / ranks * nbytes * adding_s_per_byte


@lru_cache(maxsize=1024)
def all_reduce_s(fabric: Fabric, ranks: int, nbytes: float, adding_s_per_byte: float = 0.0) -> float:
    """Seconds until all have the sum (TRG section 4.5).

    Short vectors by recursive doubling, ⌈log2 p⌉ (α + nβ + nγ); long ones by Rabenseifner's algorithm
    (reduce-scatter, then all-gather), 2 ⌈log2 p⌉ α + 2 (p - 1)/p nβ + (p - 1)/p nγ. A ring moves as many
    bytes in more rounds.
    """
    doubling = sum(round_s(fabric, Pairs(distance), ranks, nbytes) for distance in distances(ranks))
    return min(
        doubling + rounds(ranks) * nbytes * adding_s_per_byte,
        reduce_scatter_s(fabric, ranks, nbytes, adding_s_per_byte) + all_gather_s(fabric, ranks, nbytes),
    )


@dataclass(frozen=True)
class Network:
    """The links of a cluster: between hosts, and one kind inside each host.

    The defaults are 10 Gbit/s Ethernet with 20 us between hosts, and 1 us and 8 GB/s inside a host. Closed
    forms are those of the network's first hosts.

    Args:
        latency_s: seconds before the first byte of a message arrives at another host.
        bandwidth_bytes_per_s: bytes per second of a host's link to the network, each way.
        local_latency_s: the same between two ranks of one host.
        local_bandwidth_bytes_per_s: the same between two ranks of one host.
        overhead_s: seconds of the processor for a message between hosts, at each end (o).
        adding_s_per_byte: seconds to add a byte of a vector to another (γ).
        link_speeds: the bandwidth of each host's link over `bandwidth_bytes_per_s`; repeated.
        topology: the links that a message between two hosts takes.

    Raises:
        ValueError: a time below zero, or a bandwidth or speed that is not above zero.
    """

    latency_s: float = 20e-6
    bandwidth_bytes_per_s: float = 1.25e9
    local_latency_s: float = 1e-6
    local_bandwidth_bytes_per_s: float = 8e9
    overhead_s: float = 0.0
    adding_s_per_byte: float = 0.0
    link_speeds: tuple[float, ...] = (1.0,)
    topology: Switch = field(default=Switch())

    def __post_init__(self) -> None:
        # Building the links checks their values.
        _ = self.remote, self.local, self._links
        if not self.adding_s_per_byte >= 0:
            raise ValueError(f"adding_s_per_byte is {self.adding_s_per_byte}; expected 0 or more seconds")

    @classmethod
    def free(cls) -> Network:
        """A network that costs nothing."""
        return cls(0.0, inf, 0.0, inf)

    @classmethod
    def parse(cls, text: str) -> Network:
        """Return the network of words such as "10gbit,50us" or "10gbit,50us,torus:4x4".

        Raises:
            ValueError: a word is missing or wrong, or the network is impossible.
        """
        words = [word.strip() for word in text.lower().split(",")]
        if len(words) not in (2, 3):
            raise ValueError(
                f"network is '{text}'; expected RATE,LATENCY or RATE,LATENCY,TOPOLOGY, such as 10gbit,50us"
            )
        topology = parse_topology(words[2]) if words[2:] else Switch()
        return cls(quantity(words[1], TIMES), quantity(words[0], BITS), topology=topology)

    @override
    def __str__(self) -> str:
        """Return the words that `parse` reads, of the links between hosts."""
        words = [in_units(self.bandwidth_bytes_per_s, BITS), in_units(self.latency_s, TIMES)]
        return ",".join(words if self.topology == Switch() else [*words, str(self.topology)])

    def shared_by(self, groups: int) -> Network:
        """Return the network that each of some groups has, whose messages share the links between hosts."""
        return (
            replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / groups) if groups > 1 else self
        )

    @cached_property
    def remote(self) -> Link:
        """The link between two hosts."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s, self.overhead_s)

    @cached_property
    def local(self) -> Link:
        """The link between two ranks of one host."""
        return Link(self.local_latency_s, self.local_bandwidth_bytes_per_s)

    def route(self, here: int, there: int, size: int | None = None) -> tuple[Hop, ...]:
        """Return the ports that a message from host `here` occupies on its way to host `there`, in order.

        Args:
            here: the number of the sending host.
            there: the number of another host.
            size: how many hosts there are; only a ring and sites need it.

        Raises:
            ValueError: the topology has too few hosts, or needs `size`.
        """
        if size is None and (isinstance(self.topology, Sites) or self.topology == Torus()):
            raise ValueError(f"topology is {self.topology}; expected the number of hosts as `size`")
        return self.topology.route(here, there, size or max(here, there) + 1, self._link_of)

    @cached_property
    def _links(self) -> list[Link]:
        speeds = [self.bandwidth_bytes_per_s * speed for speed in self.link_speeds]
        return [Link(self.latency_s, speed, self.overhead_s) for speed in speeds]

    def _link_of(self, host: int) -> Link:
        return self._links[host % len(self._links)]

    def between(self, hosts: int) -> Fabric:
        """Return the links between the first hosts."""
        if self.topology == Switch() and self.link_speeds == (1.0,):
            return self.remote
        return _contended(self, (1,) * hosts)

    def ranks(self, hosts: Sequence[int]) -> Fabric:
        """Return the links between all ranks of hosts of these numbers of ranks."""
        return _contended(self, tuple(hosts))

    def barrier_s(self, hosts: Sequence[int]) -> float:
        """Seconds of a barrier over hosts of these numbers of ranks: inside the hosts, then between them."""
        return barrier_s(self.local, max(hosts)) + barrier_s(self.between(len(hosts)), len(hosts))

    def broadcast_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds of a broadcast of `nbytes`: between the hosts, then inside each."""
        between = broadcast_s(self.between(len(hosts)), len(hosts), nbytes)
        return between + broadcast_s(self.local, max(hosts), nbytes)

    def all_gather_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds until all ranks have all `nbytes`: between hosts, and inside."""
        between = all_gather_s(self.between(len(hosts)), len(hosts), nbytes)
        return between + all_gather_s(self.local, max(hosts), nbytes)

    def reduce_scatter_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds until each rank has its slice of the sum: inside the hosts, and between them."""
        inside = reduce_scatter_s(self.local, max(hosts), nbytes, self.adding_s_per_byte)
        adding = self.adding_s_per_byte / min(hosts)  # each rank of a host adds up its slice
        return inside + reduce_scatter_s(self.between(len(hosts)), len(hosts), nbytes, adding)

    def all_reduce_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds until all ranks have the sum of vectors of `nbytes`.

        Each rank of a host reduces its slice, the owners of a slice all-reduce it between the hosts (all
        slices of a host go through one link, so it carries n bytes), and each host gathers.
        """
        most, adding = max(hosts), self.adding_s_per_byte
        if len(hosts) == 1:
            return all_reduce_s(self.local, most, nbytes, adding)
        inside = reduce_scatter_s(self.local, most, nbytes, adding) + all_gather_s(self.local, most, nbytes)
        return inside + all_reduce_s(self.between(len(hosts)), len(hosts), nbytes, adding / min(hosts))


@lru_cache(maxsize=64)
def _contended(network: Network, hosts: tuple[int, ...]) -> Contended:
    host_of = [host for host, ranks in enumerate(hosts) for _ in range(ranks)]

    def route(sender: int, receiver: int) -> tuple[Hop, ...]:
        here, there = host_of[sender], host_of[receiver]
        if here == there:
            return (Hop(("memory", receiver), network.local),)
        return network.route(here, there, len(hosts))

    return Contended(route)
