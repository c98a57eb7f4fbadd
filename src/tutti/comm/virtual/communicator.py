"""The communicator of a virtual rank."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TypeVar, cast

import cloudpickle
import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import ANY, Communicator, Counter, by_color, cut
from tutti.comm.network import Network
from tutti.comm.reductions import SUM
from tutti.comm.virtual.group import Message, PendingCollective, VirtualGroup
from tutti.comm.virtual.scheduler import RankTask, Scheduler, Wait, whole_ticks

V = TypeVar("V")
R = TypeVar("R")


class VirtualCommunicator(Communicator):
    """A rank's view of a group of virtual ranks. Made by `VirtualWorld.run` and by `split`."""

    in_backward = False  # Ranks are greenlets of one thread, and autograd cannot switch between them.

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self._group = group
        self._cluster = group.cluster
        self._scheduler: Scheduler = group.cluster.scheduler
        self._task: RankTask = group.tasks[rank]
        self._closed = False
        self.rank, self.size, self.hosts = rank, len(group.members), len(group.host_sizes)
        self.adding_s_per_byte = group.cluster.network.adding_s_per_byte

    @override
    def barrier(self) -> None:
        self._collective("barrier", None, lambda _: (self._price.barrier_s(self._hosts), None))

    @override
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        self._check_rank(root)

        def finish(vectors: list[Tensor]) -> tuple[float, None]:
            for other in vectors:
                if other is not vectors[root]:
                    other.copy_(vectors[root])
            return self._price.broadcast_s(self._hosts, vector.nbytes), None

        self._of_vectors("broadcast", vector, finish, root=root)

    @override
    def all_reduce(self, vector: Tensor) -> None:
        def finish(vectors: list[Tensor]) -> tuple[float, None]:
            total = _sum(vectors)
            for other in vectors:
                other.copy_(total)
            return self._price.all_reduce_s(self._hosts, vector.nbytes), None

        self._of_vectors("all_reduce", vector, finish)

    @override
    def reduce_scatter(self, vector: Tensor) -> None:
        def finish(vectors: list[Tensor]) -> tuple[float, None]:
            total = _sum(vectors)
            for other, own in zip(vectors, cut(len(total), self.size), strict=True):
                other[own] = total[own]
            return self._price.reduce_scatter_s(self._hosts, vector.nbytes), None

        self._of_vectors("reduce_scatter", vector, finish)

    @override
    def all_gather(self, vector: Tensor) -> None:
        def finish(vectors: list[Tensor]) -> tuple[float, None]:
            parts = zip(vectors, cut(len(vector), self.size), strict=True)
            whole = torch.cat([other[own] for other, own in parts])
            for other in vectors:
                other.copy_(whole)
            return self._price.all_gather_s(self._hosts, vector.nbytes), None

        self._of_vectors("all_gather", vector, finish)

    @override
    def broadcast_object(self, value: object, root: int = 0) -> object:
        self._check_rank(root)

        def finish(values: list[object]) -> tuple[float, bytes]:
            payload = cloudpickle.dumps(values[root])
            return self._price.broadcast_s(self._hosts, len(payload)), payload

        return pickle.loads(self._collective("broadcast_object", value, finish, root=root))

    @override
    def all_gather_objects(self, value: object) -> list[object]:
        def finish(values: list[object]) -> tuple[float, bytes]:
            payload = cloudpickle.dumps(values)
            return self._price.all_gather_s(self._hosts, len(payload)), payload

        found: list[object] = pickle.loads(self._collective("all_gather_objects", value, finish))
        return found

    @override
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        self._check_rank(to)
        self._begin("send")
        self._scheduler.advance(self._task, self._post(vector, to, tag))

    def _post(self, vector: Tensor, to: int, tag: int) -> float:
        """Send a message; return when this rank is done with it."""
        self._group.require_alive(to)
        queue, task = self._group.queues[to], self._task
        done, arrival = self._cluster.transmit(task.rank, queue.owner.rank, vector.nbytes, task.clock)
        arrival = whole_ticks(arrival)  # as clocks are: a rank that waits until then has it
        if queue.put(Message(vector.detach().clone(), self.rank, tag, arrival)):
            self._scheduler.wake(queue.owner, arrival)
        return done

    @override
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        if source != ANY:
            self._check_rank(source)
        self._begin("recv")
        return self._receive(vector, source, tag)

    def _receive(self, vector: Tensor, source: int, tag: int) -> int:
        """Wait for a message and take it from the queue; return the sender."""
        task, queue = self._task, self._group.queues[self.rank]
        queue.wanted = source, tag
        while (message := queue.first(source, tag)) is None or message.arrival_s > task.clock:
            if message is not None:
                self._scheduler.advance(task, message.arrival_s)
            else:
                self._group.require_alive(None if source == ANY else source)
                self._scheduler.block(task, self._wait_for_message(source, tag))
        queue.wanted = None
        if message.vector.shape != vector.shape or message.vector.dtype != vector.dtype:
            raise ValueError(
                f"rank {message.source} sent {_describe(message.vector)} with tag {tag}, but rank "
                f"{self.rank} receives it into {_describe(vector)}; both must be equal"
            )
        queue.take(message)
        overhead = self._cluster.overhead_s(self._group.members[message.source], task.rank)
        if overhead:
            self._scheduler.advance(task, task.clock + overhead)
        vector.detach().copy_(message.vector)
        return message.source

    @override
    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        self._check_rank(to)
        self._check_rank(source)
        self._begin("exchange")
        done = self._post(outgoing, to, tag)
        self._receive(incoming, source, tag)
        if done > self._task.clock:
            self._scheduler.advance(self._task, done)

    @override
    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        """Return the sender of an arrived message. The check takes the latency of a link inside a host."""
        if source != ANY:
            self._check_rank(source)
        self._begin("waiting")
        task = self._task
        self._scheduler.advance(task, task.clock + self._cluster.local.latency_s)
        message = self._group.queues[self.rank].first(source, tag)
        if message is not None and message.arrival_s <= task.clock:
            return message.source
        if message is None:
            self._group.require_alive(None if source == ANY else source)
        return None

    @override
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        node = self.node

        def finish(_: list[None]) -> tuple[float, Tensor]:
            return node._price.barrier_s(node._hosts), torch.zeros(shape, dtype=dtype)

        # `.data` has the same memory and another version counter. So autograd sees no in-place change when
        # other ranks write, as with the memory of other processes.
        return node._collective("shared", None, finish, shape=shape, dtype=dtype).data

    @override
    def counter(self) -> Counter:
        def finish(_: list[None]) -> tuple[float, list[int]]:
            return self._price.barrier_s(self._hosts), [0]

        return _VirtualCounter(self, self._collective("counter", None, finish))

    @override
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        node = self.node

        def finish(_: list[None]) -> tuple[float, list[_LockState]]:
            return node._price.barrier_s(node._hosts), [_LockState(node._group) for _ in range(count)]

        states = node._collective("locks", None, finish, count=count)
        return [_VirtualLock(node, state) for state in states]

    @cached_property
    @override
    def node(self) -> VirtualCommunicator:
        return self if self.hosts == 1 else self._in(self._group.node(self._task.rank))

    @cached_property
    @override
    def cross(self) -> VirtualCommunicator | None:
        group = self._group.lane(self._task.rank)
        return None if group is None else self._in(group)

    def _in(self, group: VirtualGroup) -> VirtualCommunicator:
        """Return the communicator of this rank in another group."""
        return VirtualCommunicator(group, group.members.index(self._task.rank))

    @override
    def split(self, color: int | None, key: int = 0) -> VirtualCommunicator | None:
        def finish(choices: list[tuple[int | None, int]]) -> tuple[float, dict[int, VirtualGroup]]:
            divided = {part: ranks for part, ranks in by_color(choices).items() if part is not None}
            groups = self._group.parts(divided)
            return self._price.all_gather_s(self._hosts, 16 * self.size), groups

        groups = self._collective("split", (color, key), finish)
        return None if color is None else self._in(groups[color])

    @override
    def clock(self) -> float:
        return self._task.clock

    @override
    def compute(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"compute got {seconds} s; expected 0 or more")
        self._scheduler.advance(self._task, self._task.clock + seconds)

    @override
    def close(self) -> None:
        self._closed = True

    @property
    def _price(self) -> Network:
        return self._group.price

    @property
    def _hosts(self) -> tuple[int, ...]:
        return self._group.host_sizes

    def _of_vectors(
        self,
        name: str,
        vector: Tensor,
        finish: Callable[[list[Tensor]], tuple[float, None]],
        **agreed: object,
    ) -> None:
        self._check(vector)
        self._collective(name, vector, finish, length=len(vector), dtype=vector.dtype, **agreed)

    def _begin(self, operation: str) -> None:
        self._scheduler.begin(self._task, operation)
        if self._closed:
            raise RuntimeError(f"{operation} on a closed communicator; call close() last")

    def _collective(
        self, name: str, value: V, finish: Callable[[list[V]], tuple[float, R]], **agreed: object
    ) -> R:
        """Wait for all ranks of the group, and return the result.

        The last rank calls `finish` with all values in rank order; it returns (the seconds of the collective,
        the result). The arguments `agreed` must be equal on all ranks.
        """
        group, task = self._group, self._task
        self._begin(name)
        call = f"{name}({', '.join(f'{key}={it}' for key, it in agreed.items())})"
        group.require_alive()
        pending = cast("PendingCollective[V, R]", group.pending) or PendingCollective[V, R](call, self.rank)
        if pending.call != call:
            raise ValueError(
                f"ranks called different collectives: rank {pending.first} called {pending.call}, "
                f"rank {self.rank} {call}; all ranks must make the same calls in the same order"
            )
        group.pending = cast("PendingCollective[object, object]", pending)
        pending.values[self.rank] = value
        if len(pending.values) < self.size:
            self._scheduler.block(task, Wait(f"{call}, of {self.size} ranks", group.members, group.missing))
        else:
            group.pending = None
            with torch.no_grad():
                seconds, pending.result = finish([pending.values[rank] for rank in range(self.size)])
            end = task.clock + seconds
            for other in group.tasks:
                if other is not task:
                    self._scheduler.wake(other, end)
            self._scheduler.advance(task, end)
        return cast("R", pending.result)

    def _wait_for_message(self, source: int, tag: int) -> Wait:
        members, own = self._group.members, self._task.rank
        if source == ANY:
            what = f"recv from any rank, tag {tag}"
            return Wait(what, members, lambda: [rank for rank in members if rank != own], anyone=True)
        sender = members[source : source + 1]
        return Wait(f"recv from rank {source}, tag {tag}", sender, lambda: sender)


def _describe(vector: Tensor) -> str:
    return f"{tuple(vector.shape)} of {vector.dtype}"


def _sum(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    if len(vectors) > 1:
        SUM.fold(vectors, total)
    return total


class _VirtualCounter(Counter):
    """A number on one host; an addition takes a round trip."""

    def __init__(self, comm: VirtualCommunicator, value: list[int]) -> None:
        self._comm, self._value = comm, value

    @override
    def add(self, amount: int = 1) -> int:
        comm = self._comm
        comm._begin("counter.add")
        before = self._value[0]
        self._value[0] += amount
        link = comm._cluster.remote if comm.hosts > 1 else comm._cluster.local
        comm._scheduler.advance(comm._task, comm._task.clock + 2 * link.latency_s)
        return before


class _LockState:
    """The state of a lock: its owner, and the ranks that wait for it."""

    def __init__(self, group: VirtualGroup) -> None:
        self.owner: RankTask | None = None
        self.queue: deque[RankTask] = deque()
        self._cluster = group.cluster
        for task in group.tasks:
            task.on_death.append(partial(self.release, task))

    def release(self, task: RankTask) -> None:
        """Pass the lock on, if `task` owns it."""
        if self.owner is not task:
            return
        self.owner = None
        while self.queue and self.owner is None:
            following = self.queue.popleft()
            if not following.done:
                self.owner = following
                self._cluster.scheduler.wake(following, task.clock + self._cluster.local.latency_s)


class _VirtualLock(AbstractContextManager[None]):
    """A rank's handle of a lock; waiting ranks get it in the order of their requests."""

    def __init__(self, comm: VirtualCommunicator, state: _LockState) -> None:
        self._comm, self._state = comm, state

    def __enter__(self) -> None:
        comm, state, task = self._comm, self._state, self._comm._task
        comm._begin("lock")
        if state.owner is None:
            state.owner = task
            comm._scheduler.advance(task, task.clock + comm._cluster.local.latency_s)
            return
        state.queue.append(task)
        comm._scheduler.block(task, Wait("lock", (), lambda: [state.owner.rank] if state.owner else []))

    def __exit__(self, *_: object) -> None:
        self._state.release(self._comm._task)
