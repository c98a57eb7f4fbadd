"""Ranks inside one process, with virtual clocks: for tests, and to simulate a cluster on a laptop.

The vectors are real, time is not: computing takes the seconds given to `compute`, messages and collectives
take those of the `Network`. A run is deterministic, thousands of ranks are cheap, and faults can be planned.

    def program(comm):
        vector = torch.full((4,), float(comm.rank))
        comm.all_reduce(vector)
        return vector, comm.clock()

    results = VirtualWorld(ranks=8, ranks_per_host=4).run(program)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar, cast

from tutti.comm.base import SERVER_PERIOD, Servers
from tutti.comm.network import Network
from tutti.comm.virtual.communicator import VirtualCommunicator
from tutti.comm.virtual.group import Cluster, VirtualGroup
from tutti.comm.virtual.scheduler import Deadlock, Fault, Scheduler

__all__ = ["Deadlock", "Fault", "Network", "VirtualCommunicator", "VirtualWorld"]

R = TypeVar("R")

ETHERNET: Final = Network()
"""The default network."""


class VirtualWorld:
    """Ranks that run as greenlets of this process, with virtual clocks.

    `compute(seconds)` moves the clock of a rank; sends, collectives, counters and locks move it by the times
    of `network`. Ranks act in the order of their clocks, the lower rank first among equals, so every run is
    the same.

    Args:
        ranks: the number of ranks.
        ranks_per_host: the number of ranks on each host (the last host has the rest), or a list with a number
            for each host. None: all ranks are on one host.
        network: the times of messages.
        faults: the deaths of ranks. A rank that waits for a dead one gets `PeerLost`.
        servers: the number of further ranks for parameter centres, numbered after the others and spread over
            the hosts in turn.
        levels: of centres, as in `Servers`.
        server_period: as in `Servers`.

    Attributes:
        clocks: the virtual time of each rank in seconds at the end of the last run.
        lost: the ranks that were killed in the last run.

    Raises:
        ValueError: `ranks_per_host` does not fit `ranks`, or a fault has an unknown rank.
    """

    def __init__(
        self,
        ranks: int,
        ranks_per_host: int | Sequence[int] | None = None,
        network: Network = ETHERNET,
        faults: Sequence[Fault] = (),
        *,
        servers: int = 0,
        levels: int = 1,
        server_period: int = SERVER_PERIOD,
    ) -> None:
        self.ranks, self.network, self.faults = ranks, network, tuple(faults)
        self.servers, self.levels, self.server_period = servers, levels, server_period
        sizes = _host_sizes(ranks, ranks_per_host)
        workers = [host for host, size in enumerate(sizes) for _ in range(size)]
        self._host_of = (*workers, *(number % len(sizes) for number in range(servers)))
        for fault in self.faults:
            if not 0 <= fault.rank < ranks + servers:
                raise ValueError(f"{fault} names no rank of this world; expected 0 to {ranks + servers - 1}")
        self.clocks: list[float] = []
        self.lost: list[int] = []

    @property
    def seconds(self) -> float:
        """The virtual time of the last run: the largest clock."""
        return max(self.clocks, default=0.0)

    def run(self, function: Callable[..., R], *arguments: object) -> list[R]:
        """Call `function(comm, *arguments)` on every rank, servers included, in a new world at time 0.

        Each rank has its own state of torch's random numbers and gradient mode, which begins as a copy of the
        caller's; the caller's does not change.

        Args:
            function: its first argument is the communicator of the rank: that of the workers, or on a server
                that of the servers; `comm.servers.serving` tells which.
            arguments: further arguments, the same objects for all ranks.

        Returns:
            The results of the workers, in rank order; None for a rank that was killed.

        Raises:
            Deadlock: all ranks wait for each other.
            PeerLost: a rank waited for one that was killed or has returned.
            ValueError: ranks called different collectives, or passed different lengths or dtypes.
            Exception: any other error of a rank; it ends the run.
        """
        comms: list[VirtualCommunicator] = []

        def program(rank: int) -> R:
            return function(comms[rank], *arguments)

        ranks = range(len(self._host_of))
        scheduler = Scheduler([partial(program, rank) for rank in ranks], self.faults)
        comms.extend(self._communicators(Cluster(scheduler, self.network, self._host_of)))
        try:
            scheduler.run()
        finally:
            self.clocks = [task.clock for task in scheduler.tasks]
            self.lost = [task.rank for task in scheduler.tasks if task.lost]
        return cast("list[R]", scheduler.results[: self.ranks])

    def _communicators(self, cluster: Cluster) -> list[VirtualCommunicator]:
        """Return the communicator of each rank, among the workers or among the servers."""
        workers, every = range(self.ranks), range(len(self._host_of))
        groups = [VirtualGroup(cluster, ranks) for ranks in (workers, every[self.ranks :]) if ranks]
        comms = [VirtualCommunicator(group, rank) for group in groups for rank in range(len(group.members))]
        if self.servers:
            whole, ranks = VirtualGroup(cluster, every), tuple(every[self.ranks :])
            for rank, comm in enumerate(comms):
                reach = VirtualCommunicator(whole, rank)
                comm.servers = Servers(reach, ranks, self.levels, self.server_period)
        return comms


def _host_sizes(ranks: int, ranks_per_host: int | Sequence[int] | None) -> list[int]:
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; expected at least 1")
    if ranks_per_host is None:
        return [ranks]
    if isinstance(ranks_per_host, int):
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host is {ranks_per_host}; expected at least 1")
        full, rest = divmod(ranks, ranks_per_host)
        return [ranks_per_host] * full + [rest] * (rest > 0)
    sizes = list(ranks_per_host)
    if sum(sizes) != ranks or min(sizes) < 1:
        raise ValueError(
            f"ranks_per_host is {sizes}; expected numbers of at least 1 that add up to {ranks} ranks"
        )
    return sizes
