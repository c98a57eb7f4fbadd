"""The cost of communication: latency + bytes / bandwidth for a message, closed forms for collectives.

The forms are those of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", Int. Journal of High Performance Computing Applications 19(1), 2005 (below: TRG):

    p  ranks        α  latency of a link in s        n  bytes of the whole vector        β  seconds per byte

The cost of adding numbers (their γ) is left out: it is small against β on every network. Where TRG give one
algorithm for short and one for long vectors, the cheaper of the two is charged, as MPI libraries choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Args:
        latency_s: seconds before the first byte of a message arrives.
        bandwidth_bytes_per_s: bytes per second after that; `inf` for none to pay.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s is {self.latency_s}; expected 0 or more seconds")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; expected more than 0")

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that `nbytes` keep the link busy: nβ."""
        return nbytes / self.bandwidth_bytes_per_s

    def message_s(self, nbytes: float) -> float:
        """Seconds from the begin of a send to its arrival: α + nβ."""
        return self.latency_s + self.transfer_s(nbytes)


def rounds(ranks: int) -> int:
    """The rounds of a tree over `ranks` ranks: ⌈log2 p⌉."""
    return (ranks - 1).bit_length()


def barrier_s(link: Link, ranks: int) -> float:
    """Seconds of a barrier by dissemination: ⌈log2 p⌉ α (Hensgen, Finkel, Manber 1988)."""
    return rounds(ranks) * link.latency_s


def broadcast_s(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds of a broadcast (TRG section 4.2).

    Short vectors by a binomial tree, ⌈log2 p⌉ (α + nβ); long ones by scatter and ring all-gather,
    (⌈log2 p⌉ + p - 1) α + 2 (p - 1)/p nβ.
    """
    tree = rounds(ranks) * link.message_s(nbytes)
    ring = (rounds(ranks) + ranks - 1) * link.latency_s + 2 * link.transfer_s(_others(ranks, nbytes))
    return min(tree, ring)


def all_gather_s(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds of an all-gather of `nbytes` in all, or of a reduce-scatter, which is the way back.

    By recursive doubling, Bruck's algorithm or recursive halving, ⌈log2 p⌉ α + (p - 1)/p nβ (TRG sections 4.1
    and 4.3).
    """
    return rounds(ranks) * link.latency_s + link.transfer_s(_others(ranks, nbytes))


reduce_scatter_s = all_gather_s


def all_reduce_s(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds until all have the sum (TRG section 4.5).

    Short vectors by recursive doubling, ⌈log2 p⌉ (α + nβ); long ones by Rabenseifner's algorithm
    (reduce-scatter, then all-gather), 2 ⌈log2 p⌉ α + 2 (p - 1)/p nβ. A ring moves as many bytes in more
    rounds.
    """
    doubling = rounds(ranks) * link.message_s(nbytes)
    return min(doubling, 2 * all_gather_s(link, ranks, nbytes))


def _others(ranks: int, nbytes: float) -> float:
    """(p - 1)/p n: the bytes of the vector that belong to the others."""
    return nbytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Network:
    """The links of a cluster: one kind between hosts, one inside each host.

    The defaults are 10 Gbit/s Ethernet with 20 us between hosts, and 1 us and 8 GB/s inside a host.

    Args:
        latency_s: seconds before the first byte of a message arrives at another host.
        bandwidth_bytes_per_s: bytes per second of a host's link to the network, each way.
        local_latency_s: the same between two ranks of one host.
        local_bandwidth_bytes_per_s: the same between two ranks of one host.

    Raises:
        ValueError: a latency below zero, or a bandwidth that is not above zero.
    """

    latency_s: float = 20e-6
    bandwidth_bytes_per_s: float = 1.25e9
    local_latency_s: float = 1e-6
    local_bandwidth_bytes_per_s: float = 8e9

    def __post_init__(self) -> None:
        # Building the links checks their values.
        _ = self.remote, self.local

    @classmethod
    def free(cls) -> Network:
        """A network that costs nothing."""
        return cls(0.0, inf, 0.0, inf)

    @property
    def remote(self) -> Link:
        """The link between two hosts."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s)

    @property
    def local(self) -> Link:
        """The link between two ranks of one host."""
        return Link(self.local_latency_s, self.local_bandwidth_bytes_per_s)

    def barrier_s(self, hosts: Sequence[int]) -> float:
        """Seconds of a barrier over hosts of these numbers of ranks: inside the hosts, then between them."""
        return barrier_s(self.local, max(hosts)) + barrier_s(self.remote, len(hosts))

    def broadcast_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds of a broadcast of `nbytes`: between the hosts, then inside each."""
        return broadcast_s(self.remote, len(hosts), nbytes) + broadcast_s(self.local, max(hosts), nbytes)

    def all_gather_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds until all ranks have all `nbytes`, or of a reduce-scatter: between hosts, and inside."""
        return all_gather_s(self.remote, len(hosts), nbytes) + all_gather_s(self.local, max(hosts), nbytes)

    reduce_scatter_s = all_gather_s

    def all_reduce_s(self, hosts: Sequence[int], nbytes: float) -> float:
        """Seconds until all ranks have the sum of vectors of `nbytes`.

        Each rank of a host reduces its slice, the owners of a slice all-reduce it between the hosts (all
        slices of a host go through one link, so it carries n bytes), and each host gathers.
        """
        if len(hosts) == 1:
            return all_reduce_s(self.local, hosts[0], nbytes)
        inside = 2 * all_gather_s(self.local, max(hosts), nbytes)
        return inside + all_reduce_s(self.remote, len(hosts), nbytes)
