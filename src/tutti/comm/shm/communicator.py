"""The processes of one machine, over the arena and nothing else: no MPI, no port, no file.

`rows` and `messages` say what the ranks do, as generators that yield whenever they must wait. Here they are
run to their ends in the thread that calls: a collective comes back when it is done.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Final, TypeVar, cast

import cloudpickle
import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import ANY, Communicator, by_color, cut
from tutti.comm.counters import HostCounter
from tutti.comm.reductions import SUM
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.barrier import BARRIER, Call, Kind
from tutti.comm.shm.collectives import SHORT, HostCollectives
from tutti.comm.shm.fence import fence
from tutti.comm.shm.layout import HostGroup, control_bytes
from tutti.comm.shm.liveness import Peers, wait
from tutti.comm.shm.point_to_point import HostMessages, Receiving, run_together

T = TypeVar("T")

CHECK_EVERY_S: Final = 0.01
"""How often a rank that looks for messages without waiting also looks who has died."""

JOIN_TIMEOUT_S: Final = 120.0


class HostCommunicator(Communicator):
    """The ranks of one machine. Joining is collective: it returns when all ranks have come.

    For one thread of each rank. After a rank was lost no further operation is possible.

    Args:
        group: the ranks.
        cores: how many cores the ranks have between them; by default, those that their affinities allow. With
            more ranks than cores no wait spins.
        join_timeout_s: seconds to wait for the others to come.
        peers: for a part of a communicator, what its whole knows of the processes.

    Raises:
        PeerLost: a rank died before it came, or did not come in time.
    """

    def __init__(
        self,
        group: HostGroup,
        *,
        cores: int | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        peers: Peers | None = None,
    ) -> None:
        self.rank, self.size, self.hosts = group.rank, group.size, 1
        self._group, self._arena = group, group.arena
        self._closed = self._owns_arena = False
        self._whole = peers is None
        self._peers = peers or Peers(group, join_timeout_s, cores)
        self._rows = HostCollectives(group, self._peers.crowded)
        self._messages = HostMessages(group)
        self._next_check_s = 0.0

    @classmethod
    def alone(cls) -> HostCommunicator:
        """A world of one, with an arena of its own."""
        arena = Arena.create()
        comm = cls(HostGroup(arena, arena.allocate(control_bytes(1)), 0, [0]))
        comm._owns_arena = True
        return comm

    def _run(self, steps: Generator[bool, None, T], absent: Callable[[], Sequence[int]] | None = None) -> T:
        """Run an operation to its end.

        Args:
            steps: what is to be done.
            absent: tells whom it waits for; without, a collective's.

        Returns:
            What the operation comes to.
        """
        missing, go_on = absent or self._rows.absent, steps.__next__
        try:
            while True:
                if not go_on():
                    wait(go_on, self._peers, self._group, missing)
        except StopIteration as end:
            return cast("T", end.value)

    # --- collectives

    @override
    def barrier(self) -> None:
        if not self._rows.arrive(BARRIER):
            self._run(self._rows.wait(BARRIER))

    @override
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        self._check(vector)
        self._check_rank(root)
        self._run(self._rows.broadcast(vector, root))

    @override
    def all_gather(self, vector: Tensor) -> None:
        self._check(vector)
        parts = [vector[part] for part in cut(len(vector), self.size)]
        self._run(self._rows.all_gather(parts[self.rank], parts))

    @override
    def all_reduce(self, vector: Tensor) -> None:
        self._check(vector)
        if self.size == 1:
            return
        short = vector.nbytes <= SHORT
        rest = self._rows.short_all_reduce(vector, SUM) if short else self._rows.all_reduce(vector, SUM)
        if rest is not None:
            self._run(rest)

    @override
    def reduce_scatter(self, vector: Tensor) -> None:
        self._check(vector)
        parts = [vector[part] for part in cut(len(vector), self.size)]
        self._run(self._rows.reduce_scatter(parts, parts[self.rank], SUM))

    @override
    def broadcast_object(self, value: object, root: int = 0) -> object:
        self._check_rank(root)
        data = cloudpickle.dumps(value) if self.rank == root else b""
        length = self._tell(len(data), Call.of(Kind.BROADCAST_OBJECT, root=root))[root]
        vector = (
            _as_vector(data) if self.rank == root else torch.empty(length, dtype=torch.uint8, device="cpu")
        )
        self._run(self._rows.broadcast(vector, root))
        return value if self.rank == root else pickle.loads(vector.numpy().data)

    @override
    def all_gather_objects(self, value: object) -> list[object]:
        mine = _as_vector(cloudpickle.dumps(value))
        lengths = self._tell(len(mine), Call.of(Kind.ALL_GATHER_OBJECTS))
        vectors = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
        vectors[self.rank] = mine
        self._run(self._rows.all_gather(mine, vectors))
        return [pickle.loads(vector.numpy().data) for vector in vectors]

    def _tell(self, number: int, call: Call) -> list[int]:
        """Return the numbers of all ranks, which they tell each other as part of a call."""
        return [found for (found,) in self._run(self._rows.tell([number], call))]

    # --- messages

    @override
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`; returns when it may be overwritten.

        Some 200 KB are buffered. Two ranks that send to each other at the same time do not block each other.
        """
        self._check(vector)
        self._check_rank(to)
        self._run(self._messages.send(vector, to, tag), lambda: [to])

    @override
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        self._check(vector)
        if source != ANY:
            self._check_rank(source)
        receiving = Receiving(source, tag)
        self._run(self._messages.recv(vector, receiving), lambda: self._senders(receiving))
        return receiving.sender

    def _senders(self, receiving: Receiving) -> list[int]:
        """The ranks that can send the message that is waited for."""
        others = [rank for rank in range(self.size) if rank != self.rank and receiving.sender in (ANY, rank)]
        if not others:
            raise ValueError(
                f"rank {self.rank} waits for a message from itself with tag {receiving.tag} that it has not "
                "sent; send it first"
            )
        return others

    @override
    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        self._check(outgoing)
        self._check(incoming)
        self._check_rank(to)
        self._check_rank(source)
        going = self._messages.send(outgoing, to, tag)
        coming = self._messages.recv(incoming, Receiving(source, tag))
        both = [(going, to), (coming, source)]
        self._run(run_together(both), lambda: [rank for _, rank in both])

    @override
    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        if source != ANY:
            self._check_rank(source)
        found = self._messages.find(Receiving(source, tag))
        if found is None and (now := time.monotonic()) >= self._next_check_s:
            self._next_check_s = now + CHECK_EVERY_S
            self._peers.check()
            # Whoever has left may have sent something with its last breath.
            found = self._messages.find(Receiving(source, tag))
        return found[0].sender if found else None

    # --- shared memory

    @override
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = 1
        for length in shape:
            count *= length
        offset = self._allocate(count * dtype.itemsize, Call.of(Kind.SHARED, dtype, count))
        return self._arena.tensor(offset, shape, dtype)

    @override
    def counter(self) -> HostCounter:
        return HostCounter(self._arena, self._allocate(8, Call.of(Kind.COUNTER)))

    @override
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        offset = self._allocate(count, Call.of(Kind.LOCKS, torch.uint8, count))
        return [self._arena.lock(offset + number) for number in range(count)]

    def _allocate(self, nbytes: int, call: Call) -> int:
        return self._tell(self._arena.allocate(nbytes) if self.rank == 0 else 0, call)[0]

    # --- groups, time, the end

    @property
    @override
    def node(self) -> HostCommunicator:
        """The ranks of this host: all of them."""
        return self

    @cached_property
    @override
    def cross(self) -> HostCommunicator:
        """A world of this rank alone: there is one host."""
        return self._part(self._arena.allocate(control_bytes(1)), [self.rank])

    @override
    def split(self, color: int | None, key: int = 0) -> HostCommunicator | None:
        choices = cast("list[tuple[int | None, int]]", self.all_gather_objects((color, key)))
        members = by_color(choices)[color]
        leads = color is not None and members[0] == self.rank
        block = self._arena.allocate(control_bytes(len(members))) if leads else 0
        blocks = self._tell(block, Call.of(Kind.SPLIT))
        return None if color is None else self._part(blocks[members[0]], members)

    def _part(self, block: int, members: Sequence[int]) -> HostCommunicator:
        global_ranks = [self._group.global_ranks[member] for member in members]
        group = HostGroup(self._arena, block, members.index(self.rank), global_ranks)
        return HostCommunicator(group, peers=self._peers)

    @override
    def clock(self) -> float:
        return time.monotonic()

    @override
    def compute(self, seconds: float) -> None:
        """Do nothing: computing takes its own time here."""

    @override
    def close(self) -> None:
        """Leave. Tensors that `shared` gave out stay usable; a rank that still waits for this one is told."""
        if self._closed:
            return
        self._closed = True
        if "cross" in vars(self):
            self.cross.close()
        # Who sees LEFT sees all that this rank has done before.
        fence()
        # Each rank stores its LEFT and then loads the others'. Without the lock the order of a store and
        # later loads would count, which x86 does not keep either; with it, only the last rank finds all left.
        group = self._group
        with self._arena.lock(group.block):
            group.leave()
            all_left = group.all_have_left()
        if not self._whole and all_left:
            self._arena.release(group.block, group.layout.nbytes)
        if self._whole:
            self._peers.close()
        if self._owns_arena:
            self._arena.close()


def _as_vector(data: bytes) -> Tensor:
    """A copy of some bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
