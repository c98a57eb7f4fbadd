"""The ranks of a cluster, the links between them, and the cost of their collectives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

import numpy

from tutti.comm.network import Network
from tutti.studies.simulate.ports import PortUse, ReplayPort
from tutti.studies.simulate.recorder import CommOperation


class HostLayout:
    """Ranks on hosts. Servers are numbered after the workers, on the hosts in turn."""

    def __init__(self, network: Network, hosts: Sequence[int]) -> None:
        self.network, self.sizes, self.ranks = network, tuple(hosts), sum(hosts)
        self.starts = numpy.array([0, *accumulate(hosts)][:-1])  # the first rank of each host
        self.host_of = numpy.repeat(numpy.arange(len(hosts)), hosts)  # the host of each worker
        self._ports: dict[Hashable, ReplayPort] = {}

    def seconds(self, operation: CommOperation, sizes: Sequence[int]) -> float:
        """Return the seconds of a collective over hosts with these numbers of ranks."""
        lanes = min(self.sizes) if operation.group == "lane" else 1
        cost = getattr(self.network.shared_by(lanes), f"{operation.kind}_s")
        seconds: float = cost(sizes) if operation.kind == "barrier" else cost(sizes, operation.nbytes)
        return seconds

    def way(self, sender: int, receiver: int) -> tuple[PortUse, ...]:
        """Return the route of a message between two ranks."""
        here, there = (self._host(rank) for rank in (sender, receiver))
        if here == there:
            link = self.network.local
            return (
                PortUse(self._port("sender", sender), 1 / link.bandwidth_bytes_per_s, link.latency_s),
                PortUse(self._port("memory", receiver), 1 / link.bandwidth_bytes_per_s, 0.0),
            )
        return tuple(
            PortUse(self._port(hop.port), 1 / hop.link.bandwidth_bytes_per_s, hop.link.latency_s)
            for hop in self.network.route(here, there, len(self.sizes))
        )

    def overhead_s(self, sender: int, receiver: int) -> float:
        """Return the processor's seconds at each end of a message."""
        return self.network.overhead_s if self._host(sender) != self._host(receiver) else 0.0

    def _host(self, rank: int) -> int:
        server = rank - self.ranks
        return int(self.host_of[rank]) if server < 0 else server % len(self.sizes)

    def _port(self, *name: Hashable) -> ReplayPort:
        return self._ports.setdefault(name, ReplayPort())
