"""The communicators of processes: operations are generators, run to their ends in the thread that calls.

The operations themselves are in `tutti.comm.shm`, for the ranks of one host, and in `tutti.comm.mpi`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

import cloudpickle
import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import ANY, Communicator, cut
from tutti.comm.reductions import SUM
from tutti.comm.shm.barrier import Call, Collective
from tutti.comm.shm.liveness import SLOWEST_BYTES_PER_S, Peers, wait
from tutti.comm.shm.point_to_point import Receiving
from tutti.errors import PeerLost

if TYPE_CHECKING:
    from tutti.comm.mpi.collectives import HierarchicalCollectives
    from tutti.comm.mpi.group import Membership
    from tutti.comm.mpi.transport import MpiMessages
    from tutti.comm.shm.collectives import HostCollectives
    from tutti.comm.shm.layout import HostGroup
    from tutti.comm.shm.point_to_point import HostMessages

T = TypeVar("T")

CHECK_EVERY_S: Final = 0.01
"""Time between two checks for dead ranks, for a rank that looks for messages without waiting."""


class BlockingCommunicator(Communicator):
    """A communicator whose operations are run to their ends in the thread that calls."""

    _collectives: HostCollectives | HierarchicalCollectives
    _messages: HostMessages | MpiMessages
    _peers: Peers
    _group: HostGroup | Membership
    _remote = False
    _next_check_s = 0.0

    @property
    def peers(self) -> Peers:
        """The processes of the job on this host."""
        return self._peers

    def _run(
        self,
        steps: Generator[bool, None, T],
        absent: Callable[[], Sequence[int]] | None = None,
        nbytes: int = 0,
    ) -> T:
        """Run an operation to its end; `absent` returns the ranks that a message waits for."""
        missing, go_on = absent or self._collectives.absent, steps.__next__
        moving_s = nbytes / SLOWEST_BYTES_PER_S if self._remote else None
        try:
            while True:
                if not go_on():
                    wait(go_on, self._peers, self._group, missing, moving_s)
        except StopIteration as end:
            return cast("T", end.value)
        except PeerLost as error:
            self._leave(error.ranks)
            raise

    # --- collectives

    @override
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        self._check(vector)
        self._check_rank(root)
        self._run(self._collectives.broadcast(vector, root), nbytes=vector.nbytes)

    @override
    def all_gather(self, vector: Tensor) -> None:
        self._check(vector)
        parts = [vector[part] for part in cut(len(vector), self.size)]
        self._run(self._collectives.all_gather(parts[self.rank], parts), nbytes=vector.nbytes)

    @override
    def reduce_scatter(self, vector: Tensor) -> None:
        self._check(vector)
        parts = [vector[part] for part in cut(len(vector), self.size)]
        self._run(self._collectives.reduce_scatter(parts, parts[self.rank], SUM), nbytes=vector.nbytes)

    @override
    def broadcast_object(self, value: object, root: int = 0) -> object:
        self._check_rank(root)
        if self.size == 1:
            return value
        data = cloudpickle.dumps(value) if self.rank == root else b""
        length = self._all_gather_ints(len(data), Call.of(Collective.BROADCAST_OBJECT, root=root))[root]
        vector = (
            _as_vector(data) if self.rank == root else torch.empty(length, dtype=torch.uint8, device="cpu")
        )
        self._run(self._collectives.broadcast(vector, root), nbytes=vector.nbytes)
        return value if self.rank == root else pickle.loads(vector.numpy().data)

    @override
    def all_gather_objects(self, value: object) -> list[object]:
        if self.size == 1:
            return [value]
        mine = _as_vector(cloudpickle.dumps(value))
        lengths = self._all_gather_ints(len(mine), Call.of(Collective.ALL_GATHER_OBJECTS))
        vectors = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
        vectors[self.rank] = mine
        self._run(self._collectives.all_gather(mine, vectors), nbytes=sum(lengths))
        return [pickle.loads(vector.numpy().data) for vector in vectors]

    def _all_gather_ints(self, number: int, call: Call) -> list[int]:
        """Gather a number from each rank, as part of a call."""
        return [one for (one,) in self._run(self._collectives.all_gather_ints([number], call))]

    # --- messages

    @override
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`, and return when it may be overwritten.

        Inside a host some 200 KB are buffered, and two ranks that send to each other at the same time do not
        block each other.
        """
        self._check(vector)
        self._check_rank(to)
        self._run(self._messages.send(vector, to, tag), lambda: [to], vector.nbytes)

    @override
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        self._check(vector)
        if source != ANY:
            self._check_rank(source)
        receiving = Receiving(source, tag)
        self._run(self._messages.recv(vector, receiving), lambda: self._senders(receiving), vector.nbytes)
        return receiving.sender

    def _senders(self, receiving: Receiving) -> list[int]:
        """Return the ranks that can send the awaited message."""
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
        steps = self._messages.exchange(outgoing, to, incoming, source, tag)
        self._run(steps, lambda: [to, source], outgoing.nbytes + incoming.nbytes)

    @override
    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        if source != ANY:
            self._check_rank(source)
        receiving = Receiving(source, tag)
        try:
            message = self._messages.find(receiving)
            if message is None and (now := time.monotonic()) >= self._next_check_s:
                self._next_check_s = now + CHECK_EVERY_S
                self._check_peers()
                # A rank that has left may have sent something just before.
                message = self._messages.find(receiving)
        except PeerLost as error:
            self._leave(error.ranks)
            raise
        return receiving.sender if message else None

    def _check_peers(self) -> None:
        """Raise if a rank of the job is lost."""
        self._peers.check()

    def _leave(self, lost: Sequence[int]) -> None:
        """Name the lost ranks to ranks of other hosts; those of this host see it themselves."""

    # --- time and progress

    @override
    def note_progress(self) -> None:
        self._peers.note_progress()

    @override
    def clock(self) -> float:
        return time.monotonic()

    @override
    def compute(self, seconds: float) -> None:
        """Do nothing: computing takes its own time here."""


def _as_vector(data: bytes) -> Tensor:
    """Return a copy of some bytes as a vector."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
