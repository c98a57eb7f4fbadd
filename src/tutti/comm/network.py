"""The cost of communication: latency + bytes / bandwidth for a message, closed forms for collectives.

    network = Network.parse("10gbit,50us,fat-tree:16:4")
    network.all_reduce_s([8] * 32, 4e6)          seconds of 4 MB on 32 hosts of 8 ranks

`tutti.comm.closed_forms` has the formulas, `tutti.comm.topology` the ways between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from typing_extensions import override

from tutti.comm.closed_forms import (
    Fabric,
    Ways,
    all_gather_s,
    all_reduce_s,
    barrier_s,
    broadcast_s,
    reduce_scatter_s,
    rounds,
)
from tutti.comm.topology import (
    Hop,
    Link,
    Ring,
    Sites,
    Switch,
    Topology,
    bandwidth_text,
    parse_bandwidth,
    parse_time,
    parse_topology,
    time_text,
)

__all__ = [
    "Hop",
    "Link",
    "Network",
    "all_gather_s",
    "all_reduce_s",
    "barrier_s",
    "broadcast_s",
    "reduce_scatter_s",
    "rounds",
]


@dataclass(frozen=True)
class Network:
    """The links of a cluster: those between hosts, and one kind inside each host.

    The defaults are 10 Gbit/s Ethernet with 20 us between hosts, and 1 us and 8 GB/s inside a host. Closed
    forms take the first hosts of the network, one for each number of ranks.

    Args:
        latency_s: seconds before the first byte of a message arrives at another host.
        bandwidth_bytes_per_s: bytes per second of a host's link to the network, each way.
        local_latency_s: the same between two ranks of one host.
        local_bandwidth_bytes_per_s: the same between two ranks of one host.
        overhead_s: seconds of the processor for a message between hosts, at each end (o of LogGP).
        adding_s_per_byte: seconds to add a byte of a vector to another (γ of TRG).
        link_speeds: the bandwidth of each host's link, relative to `bandwidth_bytes_per_s`; further hosts
            have them in turn.
        topology: which links a message between two hosts takes.

    Raises:
        ValueError: a negative time, or a bandwidth or speed that is not above zero.
    """

    latency_s: float = 20e-6
    bandwidth_bytes_per_s: float = 1.25e9
    local_latency_s: float = 1e-6
    local_bandwidth_bytes_per_s: float = 8e9
    overhead_s: float = 0.0
    adding_s_per_byte: float = 0.0
    link_speeds: tuple[float, ...] = ()
    topology: Topology = field(default=Switch())

    def __post_init__(self) -> None:
        # Building the links checks their values.
        _ = self.remote, self.local
        if not self.adding_s_per_byte >= 0:
            raise ValueError(f"adding_s_per_byte is {self.adding_s_per_byte}; expected 0 or more seconds")
        if not all(speed > 0 for speed in self.link_speeds):
            raise ValueError(f"link_speeds are {self.link_speeds}; expected numbers above 0")

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
        words = [word.strip() for word in text.split(",")]
        if len(words) not in (2, 3):
            raise ValueError(
                f"network is '{text}'; expected bandwidth and latency, such as 10gbit,50us, then a topology"
            )
        bandwidth, latency, *topology = words
        return cls(
            parse_time(latency),
            parse_bandwidth(bandwidth),
            topology=parse_topology(topology[0]) if topology else Switch(),
        )

    @override
    def __str__(self) -> str:
        """Return the words that `parse` reads, of the links between hosts."""
        words = [bandwidth_text(self.bandwidth_bytes_per_s), time_text(self.latency_s)]
        return ",".join(words if self.topology == Switch() else [*words, str(self.topology)])

    @property
    def remote(self) -> Link:
        """The link between a host and the network."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s, self.overhead_s)

    @property
    def local(self) -> Link:
        """The link between two ranks of one host."""
        return Link(self.local_latency_s, self.local_bandwidth_bytes_per_s)

    def route(self, here: int, there: int, size: int | None = None) -> tuple[Hop, ...]:
        """Return the ports that a message between two hosts occupies, in order.

        Args:
            here: the number of the sending host.
            there: the number of another host.
            size: how many hosts there are; a ring and sites need it.

        Raises:
            ValueError: the topology has too few hosts, or `size` is missing.
        """
        if size is None and isinstance(self.topology, Ring | Sites):
            raise ValueError(f"topology is {self.topology}; expected the number of hosts as `size`")
        return self.topology.route(here, there, size or max(here, there) + 1, self._link_of)

    def _link_of(self, host: int) -> Link:
        """The link between a host and the network, at its own speed."""
        speed = self.link_speeds[host % len(self.link_speeds)] if self.link_speeds else 1.0
        return Link(self.latency_s, self.bandwidth_bytes_per_s * speed, self.overhead_s)

    def between(self, hosts: int) -> Fabric:
        """Return the links between this number of hosts, for closed forms."""
        if self.topology == Switch() and not self.link_speeds:
            return self.remote
        return _between(self, hosts)

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
        adding = self.adding_s_per_byte / min(hosts)  # a rank adds up its slice alone
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
def _between(network: Network, hosts: int) -> Fabric:
    return Ways(lambda here, there: network.route(here, there, hosts))
