"""Groups of virtual ranks, with the messages and the collective that they have under way."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from torch import Tensor

from tutti.comm.base import ANY
from tutti.comm.network import Network
from tutti.comm.topology import Link
from tutti.comm.virtual.scheduler import RankTask, Scheduler, whole_ticks
from tutti.errors import PeerLost

V = TypeVar("V")
R = TypeVar("R")


@dataclass(eq=False)
class Message:
    """A copy of a vector on its way, or arrived: its last byte is there at `arrival_s`."""

    vector: Tensor
    source: int
    tag: int
    arrival_s: float
    taken: bool = False


class MessageQueue:
    """The messages to one rank of one communicator; all operations take O(log messages)."""

    def __init__(self, owner: RankTask) -> None:
        self.owner = owner
        self._number = count()
        self._from: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._all: dict[int, list[tuple[float, int, int, Message]]] = defaultdict(list)
        self.wanted: tuple[int, int] | None = None

    def put(self, message: Message) -> bool:
        """Add a message; returns whether the owner waits for such a one."""
        self._from[message.source, message.tag].append(message)
        entry = (message.arrival_s, message.source, next(self._number), message)
        heapq.heappush(self._all[message.tag], entry)
        return self.wanted in ((message.source, message.tag), (ANY, message.tag))

    def first(self, source: int, tag: int) -> Message | None:
        """The message of `tag` from `source` (or `ANY`) that arrives first, if one was sent."""
        if source != ANY:
            queue = self._from[source, tag]
            return queue[0] if queue else None
        queue_of_all = self._all[tag]
        return queue_of_all[0][3] if queue_of_all else None

    def take(self, message: Message) -> None:
        """Remove a message that `first` returned."""
        message.taken = True
        # Messages of one sender and tag arrive in order, so the earliest of all is its sender's earliest too.
        self._from[message.source, message.tag].popleft()
        queue_of_all = self._all[message.tag]
        while queue_of_all and queue_of_all[0][3].taken:
            heapq.heappop(queue_of_all)


@dataclass(eq=False)
class Port:
    """One end of a link: it carries one message at a time, in the order in which messages get to it.

    Messages are entered in the order in which they are sent, and one with a long way comes late: another one
    may go before it, in the time until then.
    """

    _busy: deque[tuple[float, float]] = field(default_factory=deque)

    def carry(self, at: float, seconds: float, now: float) -> float:
        """Carry something for `seconds`, from `at` on or when the port is free; returns when it is done.

        Nothing may be entered later that begins before `now`.
        """
        busy = self._busy
        while busy and busy[0][1] < now:
            busy.popleft()
        begin, length = whole_ticks(at), whole_ticks(seconds)
        index = len(busy)
        while index and busy[index - 1][1] > begin:
            index -= 1
        while index < len(busy) and busy[index][0] < begin + length:
            begin = max(begin, busy[index][1])
            index += 1
        end = begin + length
        if index and busy[index - 1][1] == begin:
            busy[index - 1] = (busy[index - 1][0], end)
        else:
            busy.insert(index, (begin, end))
        return end


@dataclass(eq=False)
class PendingCollective(Generic[V, R]):
    """One collective under way.

    Attributes:
        call: what was called, and what else must agree, such as "all_reduce(length=3, dtype=torch.float32)".
        first: the rank that came first, numbered in the group.
        values: what each rank brought, by rank in the group.
        result: what all take away; set when the last has come.
    """

    call: str
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
        self.local, self.remote = self.network.local, self.network.remote
        self._hosts = max(self.host_of) + 1
        self._ports: dict[Hashable, Port] = defaultdict(Port)
        self._routes: dict[tuple[int, int], list[tuple[Port, Link]]] = {}
        self._memory = [Port() for _ in self.host_of]
        self._last: dict[tuple[int, int], float] = {}

    def transmit(self, sender: int, receiver: int, nbytes: int, at: float) -> tuple[float, float]:
        """Send bytes from one rank to another; returns (when the sender is done, when the last byte arrives).

        Between hosts a message takes its turn at each port of its route, inside a host at its receiver.
        Messages from one rank to another arrive in the order in which they are sent.
        """
        here, there = self.host_of[sender], self.host_of[receiver]
        if here == there:
            seconds = self.local.transfer_s(nbytes)
            return at + seconds, self._memory[receiver].carry(at + self.local.latency_s, seconds, at)
        head = at + self.remote.overhead_s
        tail = slowest = 0.0
        ends = []
        for port, link in self._ways(here, there):
            seconds = link.transfer_s(nbytes)
            end = port.carry(head, seconds, at)
            # A port that is faster than one before it has the last byte no sooner than that one.
            tail = end if seconds >= slowest else max(end, tail)
            slowest = max(slowest, seconds)
            head = tail - slowest + link.latency_s
            tail += link.latency_s
            ends.append(end)
        arrival = max(tail, self._last.get((sender, receiver), 0.0))
        self._last[sender, receiver] = arrival
        return ends[0], arrival

    def overhead_s(self, sender: int, receiver: int) -> float:
        """Seconds of the receiver's processor for a message."""
        return self.remote.overhead_s if self.host_of[sender] != self.host_of[receiver] else 0.0

    def _ways(self, here: int, there: int) -> list[tuple[Port, Link]]:
        """The ports between two hosts, with their links."""
        if (here, there) not in self._routes:
            route = self.network.route(here, there, self._hosts)
            self._routes[here, there] = [(self._ports[hop.port], hop.link) for hop in route]
        return self._routes[here, there]


class VirtualGroup:
    """The ranks of one communicator: the state that they share.

    Args:
        cluster: all ranks of the world.
        members: those of this group, numbered in the world.
        lanes: groups that meet at the same time through the links of the same hosts.
    """

    def __init__(self, cluster: Cluster, members: Iterable[int], lanes: int = 1) -> None:
        self.cluster, self.price = cluster, cluster.network.shared_by(lanes)
        self.members = tuple(members)
        tasks = cluster.scheduler.tasks
        self.tasks: tuple[RankTask, ...] = tuple(tasks[rank] for rank in self.members)
        self.queues = tuple(MessageQueue(task) for task in self.tasks)
        self.pending: PendingCollective[object, object] | None = None
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
        if host not in self._nodes:
            self._nodes[host] = VirtualGroup(self.cluster, self._by_host[host])
        return self._nodes[host]

    def lane(self, member: int) -> VirtualGroup | None:
        """One rank of each host, with the local rank of `member`; None where a host has too few ranks."""
        lane = self._by_host[self.cluster.host_of[member]].index(member)
        if lane >= min(self.host_sizes):
            return None
        if lane not in self._lanes:
            members = [ranks[lane] for ranks in self._by_host.values()]
            self._lanes[lane] = VirtualGroup(self.cluster, members, min(self.host_sizes))
        return self._lanes[lane]

    def parts(self, divided: Mapping[int, Sequence[int]]) -> dict[int, VirtualGroup]:
        """Return groups of ranks, which are numbered in this group."""
        members = {part: [self.members[rank] for rank in ranks] for part, ranks in divided.items()}
        hosts = {part: {self.cluster.host_of[rank] for rank in ranks} for part, ranks in members.items()}
        lanes = Counter(host for found in hosts.values() if len(found) > 1 for host in found)
        return {
            part: VirtualGroup(self.cluster, ranks, max(1, *(lanes[host] for host in hosts[part])))
            for part, ranks in members.items()
        }

    def require_alive(self, rank: int | None = None) -> None:
        """Raise `PeerLost` if this rank of the group, or any, was killed."""
        lost = [task for task in self._lost if rank is None or task is self.tasks[rank]]
        if lost:
            raise PeerLost([task.rank for task in lost], lost[0].lost)

    def missing(self) -> list[int]:
        """The ranks that have not come to the collective under way, numbered in the world."""
        come = self.pending.values if self.pending else {}
        return [task.rank for rank, task in enumerate(self.tasks) if rank not in come]
