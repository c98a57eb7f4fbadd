"""Groups of virtual ranks, with their messages and their pending collective."""

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
    """A message that was sent, with a copy of the vector."""

    vector: Tensor
    source: int
    tag: int
    arrival_s: float  # of the last byte
    taken: bool = False


class MessageQueue:
    """The messages to a rank of a communicator; all operations take O(log messages)."""

    def __init__(self, owner: RankTask) -> None:
        self.owner = owner
        self._number = count()
        self._from: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._all: dict[int, list[tuple[float, int, int, Message]]] = defaultdict(list)
        self.wanted: tuple[int, int] | None = None

    def put(self, message: Message) -> bool:
        """Add a message; return whether the owner waits for it."""
        self._from[message.source, message.tag].append(message)
        entry = (message.arrival_s, message.source, next(self._number), message)
        heapq.heappush(self._all[message.tag], entry)
        return self.wanted in ((message.source, message.tag), (ANY, message.tag))

    def first(self, source: int, tag: int) -> Message | None:
        """Return the first message to arrive with `tag` from `source` (or `ANY`), if one was sent."""
        if source != ANY:
            queue = self._from[source, tag]
            return queue[0] if queue else None
        queue_of_all = self._all[tag]
        return queue_of_all[0][3] if queue_of_all else None

    def take(self, message: Message) -> None:
        """Remove a message that `first` returned."""
        message.taken = True
        # Messages of a sender and tag arrive in order: the earliest of all is also its sender's earliest.
        self._from[message.source, message.tag].popleft()
        queue_of_all = self._all[message.tag]
        while queue_of_all and queue_of_all[0][3].taken:
            heapq.heappop(queue_of_all)


@dataclass(eq=False)
class Port:
    """One end of a link, which carries one message at a time.

    Calls come in the order of sending. A message with a long route arrives late, and one that is sent later
    may use the port before it.
    """

    _busy: deque[tuple[float, float]] = field(default_factory=deque)

    def carry(self, at: float, seconds: float, now: float) -> float:
        """Carry a message for `seconds`, after `at` and as soon as the port is free; return the end.

        Later calls carry nothing before `now`.
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
    """A collective that some ranks have called. Ranks are numbered in the group."""

    call: str  # such as "all_reduce(length=3, dtype=torch.float32)"; it must be equal on all ranks
    first: int  # the rank that called first
    values: dict[int, V] = field(default_factory=dict)  # by rank
    result: R | None = None  # set when the last rank has called


@dataclass(eq=False)
class Cluster:
    """All ranks of a world: their tasks, their hosts, and the ports between them."""

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
        """Send bytes between two ranks; return (when the sender is done, when the last byte arrives).

        Between hosts a message waits for each port of its route, inside a host for its receiver's memory.
        Messages from one rank to another arrive in the order of sending.
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
            # The last byte leaves a fast port no sooner than it arrives from a slow one.
            tail = end if seconds >= slowest else max(end, tail)
            slowest = max(slowest, seconds)
            head = tail - slowest + link.latency_s
            tail += link.latency_s
            ends.append(end)
        arrival = max(tail, self._last.get((sender, receiver), 0.0))
        self._last[sender, receiver] = arrival
        return ends[0], arrival

    def overhead_s(self, sender: int, receiver: int) -> float:
        """Return the seconds of the receiver's processor for a message."""
        return self.remote.overhead_s if self.host_of[sender] != self.host_of[receiver] else 0.0

    def _ways(self, here: int, there: int) -> list[tuple[Port, Link]]:
        """Return the ports between two hosts, with their links."""
        if (here, there) not in self._routes:
            route = self.network.route(here, there, self._hosts)
            self._routes[here, there] = [(self._ports[hop.port], hop.link) for hop in route]
        return self._routes[here, there]


class VirtualGroup:
    """The shared state of the ranks of a communicator."""

    def __init__(self, cluster: Cluster, members: Iterable[int], lanes: int = 1) -> None:
        # `lanes` groups use the links of these hosts at the same time.
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
        """Return the ranks on the host of `member`, a rank of the world."""
        host = self.cluster.host_of[member]
        if host not in self._nodes:
            self._nodes[host] = VirtualGroup(self.cluster, self._by_host[host])
        return self._nodes[host]

    def lane(self, member: int) -> VirtualGroup | None:
        """Return the ranks with the local rank of `member`, one of each host; None: a host has too few."""
        lane = self._by_host[self.cluster.host_of[member]].index(member)
        if lane >= min(self.host_sizes):
            return None
        if lane not in self._lanes:
            members = [ranks[lane] for ranks in self._by_host.values()]
            self._lanes[lane] = VirtualGroup(self.cluster, members, min(self.host_sizes))
        return self._lanes[lane]

    def parts(self, divided: Mapping[int, Sequence[int]]) -> dict[int, VirtualGroup]:
        """Return groups of the divided ranks, which are numbered in this group."""
        members = {part: [self.members[rank] for rank in ranks] for part, ranks in divided.items()}
        hosts = {part: {self.cluster.host_of[rank] for rank in ranks} for part, ranks in members.items()}
        lanes = Counter(host for found in hosts.values() if len(found) > 1 for host in found)
        return {
            part: VirtualGroup(self.cluster, ranks, max(1, *(lanes[host] for host in hosts[part])))
            for part, ranks in members.items()
        }

    def require_alive(self, rank: int | None = None) -> None:
        """Raise `PeerLost` if this rank of the group, or by default any rank, was killed."""
        lost = [task for task in self._lost if rank is None or task is self.tasks[rank]]
        if lost:
            raise PeerLost([task.rank for task in lost], lost[0].lost)

    def missing(self) -> list[int]:
        """Return the ranks that have not called the pending collective, numbered in the world."""
        called = self.pending.values if self.pending else {}
        return [task.rank for rank, task in enumerate(self.tasks) if rank not in called]
