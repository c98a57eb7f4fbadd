"""Groups of virtual ranks, and the collectives in which they meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from tutti.comm.network import Network
from tutti.comm.virtual.mailbox import Mailbox, Port
from tutti.comm.virtual.scheduler import RankTask, Scheduler
from tutti.errors import PeerLost

V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class CollectiveCall:
    """A collective as one rank calls it; all ranks must call the same.

    Attributes:
        name: the operation.
        details: what else must agree: length, dtype, root.
    """

    name: str
    details: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.details)})"


@dataclass(eq=False)
class Meeting(Generic[V, R]):
    """One collective under way.

    Attributes:
        call: what was called.
        first: the rank that came first, numbered in the group.
        values: what each rank brought, by rank in the group.
        result: what all take away; set when the last has come.
    """

    call: CollectiveCall
    first: int
    values: dict[int, V] = field(default_factory=dict)
    result: R | None = None


@dataclass(eq=False)
class Cluster:
    """All ranks of a world: their tasks, their hosts, and the ports they send through."""

    scheduler: Scheduler
    network: Network
    host_of: tuple[int, ...]

    def __post_init__(self) -> None:
        hosts = max(self.host_of) + 1
        self.local, self.remote = self.network.local, self.network.remote
        self._out = [Port() for _ in range(hosts)]
        self._into = [Port() for _ in range(hosts)]
        self._memory = [Port() for _ in self.host_of]

    def transmit(self, sender: int, receiver: int, nbytes: int, at: float) -> tuple[float, float]:
        """Send bytes from one rank to another; returns (when the sender is done, when the last byte arrives).

        Between hosts a message takes its turn on the links of both hosts, inside a host at its receiver.
        """
        here, there = self.host_of[sender], self.host_of[receiver]
        if here == there:
            seconds = self.local.transfer_s(nbytes)
            return at + seconds, self._memory[receiver].carry(at + self.local.latency_s, seconds)
        seconds = self.remote.transfer_s(nbytes)
        done = self._out[here].carry(at, seconds)
        return done, self._into[there].carry(done - seconds + self.remote.latency_s, seconds)


class VirtualGroup:
    """The ranks of one communicator: the state that they share.

    Args:
        cluster: the world.
        members: the ranks in it, numbered in the world.
    """

    def __init__(self, cluster: Cluster, members: Iterable[int]) -> None:
        self.cluster = cluster
        self.members = tuple(members)
        tasks = cluster.scheduler.tasks
        self.tasks: tuple[RankTask, ...] = tuple(tasks[rank] for rank in self.members)
        self.mailboxes = tuple(Mailbox(task) for task in self.tasks)
        self.meeting: Meeting[object, object] | None = None
        by_host: dict[int, list[int]] = {}
        for rank in self.members:
            by_host.setdefault(cluster.host_of[rank], []).append(rank)
        self._by_host = by_host
        self.host_sizes = tuple(len(ranks) for ranks in by_host.values())
        self._nodes: dict[int, VirtualGroup] = {}
        self._lanes: dict[int, VirtualGroup] = {}
        self._lost: list[RankTask] = [task for task in self.tasks if task.lost]
        for task in self.tasks:
            task.on_death.append(partial(self._lost.append, task))

    def node(self, member: int) -> VirtualGroup:
        """The ranks on the host of `member`, a rank of the world."""
        host = self.cluster.host_of[member]
        if len(self._by_host) == 1:
            return self
        if host not in self._nodes:
            self._nodes[host] = VirtualGroup(self.cluster, self._by_host[host])
        return self._nodes[host]

    def lane(self, member: int) -> VirtualGroup | None:
        """One rank of each host, with the local rank of `member`; None where a host has too few ranks."""
        lane = self._by_host[self.cluster.host_of[member]].index(member)
        if lane >= min(self.host_sizes):
            return None
        if lane not in self._lanes:
            self._lanes[lane] = VirtualGroup(self.cluster, [ranks[lane] for ranks in self._by_host.values()])
        return self._lanes[lane]

    def require_alive(self, rank: int | None = None) -> None:
        """Raise `PeerLost` if this rank of the group, or any, was killed."""
        lost = [task for task in self._lost if rank is None or task is self.tasks[rank]]
        if lost:
            raise PeerLost([task.rank for task in lost], lost[0].lost)

    def missing(self) -> list[int]:
        """Who has not yet come to the meeting under way, numbered in the world."""
        come = self.meeting.values if self.meeting else {}
        return [task.rank for rank, task in enumerate(self.tasks) if rank not in come]
