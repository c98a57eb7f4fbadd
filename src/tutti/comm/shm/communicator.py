"""The processes of one machine, over the arena and nothing else: no MPI, no port, no file.

`rows` and `messages` say what the ranks do, as generators that yield whenever they must wait. Here they are
run to their ends in the thread that calls: a collective comes back when it is done.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Final, TypeVar, cast

import cloudpickle
import torch
from torch import Tensor

from tutti.comm.base import ANY, Communicator, cut
from tutti.comm.counters import HostCounter
from tutti.comm.reductions import SUM
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.barrier import BARRIER, Call, Kind
from tutti.comm.shm.collectives import ONE_HOP, HostCollectives
from tutti.comm.shm.fence import fence
from tutti.comm.shm.layout import LEFT, ControlLayout, control_bytes
from tutti.comm.shm.liveness import Peers, wait
from tutti.comm.shm.point_to_point import HostMessages, Receiving, Together

T = TypeVar("T")

CHECK_EVERY_S: Final = 0.01
"""How often a rank that looks for messages without waiting also looks who has died."""

JOIN_TIMEOUT_S: Final = 120.0


class HostCommunicator(Communicator):
    """The ranks of one machine. Joining is collective: it returns when all ranks have come.

    For one thread of each rank. After a rank was lost no further operation is possible.

    Args:
        arena: the memory that the ranks share.
        block: where in the arena the communicator's control block of `control_bytes(size)` zero bytes begins.
        rank: this process's number, 0 to size - 1.
        size: how many ranks there are.
        names: what the ranks are called in `PeerLost`: their numbers in the whole job, if these differ.
        cores: how many cores the ranks have between them; by default, those that their affinities allow. With
            more ranks than cores no wait spins.
        join_timeout_s: seconds to wait for the others to come.
        peers: for a part of a communicator, what its whole knows of the processes.

    Raises:
        PeerLost: a rank died before it came, or did not come in time.
    """

    def __init__(
        self,
        arena: Arena,
        block: int,
        rank: int,
        size: int,
        *,
        names: Sequence[int] | None = None,
        cores: int | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        peers: Peers | None = None,
    ) -> None:
        self.rank, self.size, self.hosts = rank, size, 1
        self._arena, self._block, self._layout = arena, block, ControlLayout(size)
        self._names = tuple(range(size) if names is None else names)
        self._words = arena.words(block, self._layout.words)
        self._cross: HostCommunicator | None = None
        self._closed = self._owns_arena = False
        self._whole = peers is None
        self._peers = peers or Peers(self._words, rank, size, self._names, join_timeout_s, cores)
        self._rows = HostCollectives(arena, block, self._words, rank, self._names, self._peers.crowded)
        self._messages = HostMessages(arena, block, self._words, rank, self._names)
        self._next_check_s = 0.0

    @classmethod
    def alone(cls) -> HostCommunicator:
        """A world of one, with an arena of its own."""
        arena = Arena.create()
        comm = cls(arena, arena.allocate(control_bytes(1)), 0, 1)
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
        missing, names = absent or self._rows.absent, self._names
        go_on = steps.__next__
        try:
            while True:
                if not go_on():
                    wait(go_on, self._peers, self._words, lambda: [(rank, names[rank]) for rank in missing()])
        except StopIteration as end:
            return cast("T", end.value)

    # --- collectives

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if not self._rows.arrive(BARRIER):
            self._run(self._rows.wait(BARRIER))

    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        """Overwrite `vector` on every rank with that of rank `root`."""
        self._check(vector)
        self._check_rank(root)
        self._run(self._rows.broadcast(vector, root))

    def all_gather(self, vector: Tensor) -> None:
        """Every rank owns its slice, `cut(len(vector), size)[rank]`; fill in the others' slices."""
        self._check(vector)
        parts = [vector[part] for part in cut(len(vector), self.size)]
        self._run(self._rows.all_gather(parts[self.rank], parts))

    def all_reduce(self, vector: Tensor) -> None:
        """Overwrite `vector` on every rank with the sum over the ranks; bit-equal on all of them."""
        self._check(vector)
        if self.size == 1:
            return
        short = vector.nbytes <= ONE_HOP
        rest = self._rows.hop(vector, SUM) if short else self._rows.all_reduce(vector, SUM)
        if rest is not None:
            self._run(rest)

    def reduce_scatter(self, vector: Tensor) -> None:
        """Overwrite this rank's slice, `cut(len(vector), size)[rank]`, with the sum over the ranks."""
        self._check(vector)
        parts = [vector[part] for part in cut(len(vector), self.size)]
        self._run(self._rows.reduce_scatter(parts, parts[self.rank], SUM))

    def broadcast_object(self, value: object, root: int = 0) -> object:
        """The picklable `value` of rank `root`, on every rank."""
        self._check_rank(root)
        data = cloudpickle.dumps(value) if self.rank == root else b""
        length = self._tell(len(data), Call.of(Kind.BROADCAST_OBJECT, root=root))[root]
        vector = (
            _as_vector(data) if self.rank == root else torch.empty(length, dtype=torch.uint8, device="cpu")
        )
        self._run(self._rows.broadcast(vector, root))
        return value if self.rank == root else pickle.loads(vector.numpy().data)

    def all_gather_objects(self, value: object) -> list[object]:
        """The picklable values of all ranks, in rank order, on every rank."""
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

    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`; returns when it may be overwritten.

        Messages to one rank with one tag keep their order. Some 200 KB are buffered. Two
        ranks that send to each other at the same time do not block each other.
        """
        self._check(vector)
        self._check_rank(to)
        self._run(self._messages.send(vector, to, tag), lambda: [to])

    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        """Overwrite `vector` with the next message from `source`; returns the sender's rank.

        With `source=ANY`, first come, first served. Waiting costs no core.

        Raises:
            ValueError: the message has another length or dtype than `vector`. It stays there.
            PeerLost: a rank of the job died, or every rank that could send has left.
        """
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

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        """Send `outgoing` to rank `to` while `incoming` is overwritten with a message from `source`.

        Raises:
            ValueError: the message has another length or dtype than `incoming`. `outgoing` is sent then.
            PeerLost: a rank of the job died, or the one that is waited for has left.
        """
        self._check(outgoing)
        self._check(incoming)
        self._check_rank(to)
        self._check_rank(source)
        going = self._messages.send(outgoing, to, tag)
        coming = self._messages.recv(incoming, Receiving(source, tag))
        both = Together([(going, to), (coming, source)])
        self._run(both.run(), both.absent)

    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        """Return the sender of an unread message with this tag, or None; never wait for one."""
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

    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros that every rank of this host sees (collective)."""
        count = 1
        for length in shape:
            count *= length
        offset = self._allocate(count * dtype.itemsize, Call.of(Kind.SHARED, dtype, count))
        return self._arena.tensor(offset, shape, dtype)

    def counter(self) -> HostCounter:
        """A counter at zero that every rank of the communicator sees (collective)."""
        return HostCounter(self._arena, self._allocate(8, Call.of(Kind.COUNTER)))

    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        """So many locks for the ranks of this host, not their threads (collective)."""
        offset = self._allocate(count, Call.of(Kind.LOCKS, torch.uint8, count))
        return [self._arena.lock(offset + number) for number in range(count)]

    def _allocate(self, nbytes: int, call: Call) -> int:
        return self._tell(self._arena.allocate(nbytes) if self.rank == 0 else 0, call)[0]

    # --- groups, time, the end

    @property
    def node(self) -> HostCommunicator:
        """The ranks of this host: all of them."""
        return self

    @property
    def cross(self) -> HostCommunicator:
        """A world of this rank alone: there is one host."""
        if self._cross is None:
            self._cross = self._part(self._arena.allocate(control_bytes(1)), [self.rank])
        return self._cross

    def split(self, color: int | None, key: int = 0) -> HostCommunicator | None:
        """One communicator for all ranks that give the same `color`, ordered by (key, rank)."""
        choices = self.all_gather_objects((color, key))
        members = _members(choices, color)
        leads = color is not None and members[0] == self.rank
        block = self._arena.allocate(control_bytes(len(members))) if leads else 0
        blocks = self._tell(block, Call.of(Kind.SPLIT))
        return None if color is None else self._part(blocks[members[0]], members)

    def _part(self, block: int, members: Sequence[int]) -> HostCommunicator:
        names = [self._names[member] for member in members]
        rank = members.index(self.rank)
        return HostCommunicator(self._arena, block, rank, len(members), names=names, peers=self._peers)

    def clock(self) -> float:
        """Seconds since some fixed moment, the same for all processes of the host."""
        return time.monotonic()

    def compute(self, seconds: float) -> None:
        """Do nothing: computing takes its own time here."""

    def close(self) -> None:
        """Leave. Tensors that `shared` gave out stay usable; a rank that still waits for this one is told."""
        if self._closed:
            return
        self._closed = True
        if self._cross is not None:
            self._cross.close()
        # Who sees LEFT sees all that this rank has done before.
        fence()
        # Each rank stores its LEFT and then loads the others'. Without the lock the order of a store and
        # later loads would count, which x86 does not keep either; with it, only the last rank finds all left.
        with self._arena.lock(self._block):
            self._words[self._layout.line(self.rank) + LEFT] = 1
            everyone = [self._words[self._layout.line(rank) + LEFT] for rank in range(self.size)]
        if not self._whole and all(everyone):
            self._arena.release(self._block, self._layout.nbytes)
        if self._whole:
            self._peers.close()
        if self._owns_arena:
            self._arena.close()

    # --- arguments

    def _check(self, vector: Tensor) -> None:
        if vector.dim() != 1 or not vector.is_contiguous() or not vector.is_cpu:
            raise ValueError(
                f"a vector must be one-dimensional, contiguous and on the CPU; this one has shape "
                f"{tuple(vector.shape)}, strides {vector.stride()} and is on {vector.device}; "
                f"pass vector.contiguous().view(-1)"
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in a communicator of size {self.size}")


def _as_vector(data: bytes) -> Tensor:
    """A copy of some bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _members(choices: list[object], color: int | None) -> list[int]:
    """The ranks that chose `color`, ordered by (key, rank)."""
    pairs = enumerate(cast("list[tuple[int | None, int]]", choices))
    return [rank for _, rank in sorted((key, rank) for rank, (chosen, key) in pairs if chosen == color)]
