"""The processes of one machine, over the arena and nothing else: no MPI, no port, no file.

`collectives` and `point_to_point` are the operations, as generators that yield whenever they must wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Final, cast

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import by_color
from tutti.comm.blocking import BlockingCommunicator
from tutti.comm.counters import HostCounter
from tutti.comm.reductions import SUM
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.barrier import BARRIER, Call, Collective
from tutti.comm.shm.collectives import SHORT, HostCollectives
from tutti.comm.shm.fence import fence
from tutti.comm.shm.layout import HostGroup, control_bytes
from tutti.comm.shm.liveness import Peers
from tutti.comm.shm.point_to_point import HostMessages

JOIN_TIMEOUT_S: Final = 120.0


class HostCommunicator(BlockingCommunicator):
    """The ranks of one machine. Joining is collective: it returns when all ranks have come.

    For one thread of each rank. After a rank was lost no further operation is possible.
    """

    _collectives: HostCollectives
    _group: HostGroup

    def __init__(
        self,
        group: HostGroup,
        *,
        cores: int | None = None,  # None: by the ranks' affinities; if there are fewer, no wait spins
        join_timeout_s: float = JOIN_TIMEOUT_S,
        peers: Peers | None = None,  # of the whole, for a part of a communicator
    ) -> None:
        self.rank, self.size, self.hosts = group.rank, group.size, 1
        self._group, self._arena = group, group.arena
        self._closed = self._owns_arena = False
        self._whole = peers is None
        self._peers = peers or Peers(group, join_timeout_s, cores)
        self._collectives = HostCollectives(group, self._peers.crowded)
        self._messages = HostMessages(group)

    @classmethod
    def alone(cls) -> HostCommunicator:
        """Return a world of one, with its own arena."""
        arena = Arena.create()
        comm = cls(HostGroup(arena, arena.allocate(control_bytes(1)), 0, [0]))
        comm._owns_arena = True
        return comm

    # --- collectives

    @override
    def barrier(self) -> None:
        if not self._collectives.arrive(BARRIER):
            self._run(self._collectives.wait(BARRIER))

    @override
    def all_reduce(self, vector: Tensor) -> None:
        self._check(vector)
        if self.size == 1:
            return
        short = vector.nbytes <= SHORT
        rest = (
            self._collectives.short_all_reduce(vector, SUM)
            if short
            else self._collectives.all_reduce(vector, SUM)
        )
        if rest is not None:
            self._run(rest)

    # --- shared memory

    @override
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = math.prod(shape)
        offset = self._allocate(count * dtype.itemsize, Call.of(Collective.SHARED, dtype, count))
        return self._arena.tensor(offset, shape, dtype)

    @override
    def counter(self) -> HostCounter:
        return HostCounter(self._arena, self._allocate(8, Call.of(Collective.COUNTER)))

    @override
    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        offset = self._allocate(count, Call.of(Collective.LOCKS, torch.uint8, count))
        return [self._arena.lock(offset + number) for number in range(count)]

    def _allocate(self, nbytes: int, call: Call) -> int:
        return self._all_gather_ints(self._arena.allocate(nbytes) if self.rank == 0 else 0, call)[0]

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
        blocks = self._all_gather_ints(block, Call.of(Collective.SPLIT))
        return None if color is None else self._part(blocks[members[0]], members)

    def _part(self, block: int, members: Sequence[int]) -> HostCommunicator:
        global_ranks = [self._group.global_ranks[member] for member in members]
        group = HostGroup(self._arena, block, members.index(self.rank), global_ranks)
        return HostCommunicator(group, peers=self._peers)

    @override
    def close(self) -> None:
        """Leave. Tensors that `shared` gave out stay usable; a rank that still waits for this one is told."""
        if self._closed:
            return
        self._closed = True
        if "cross" in vars(self):
            self.cross.close()
        # A rank that sees LEFT sees everything that this rank has done before.
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
