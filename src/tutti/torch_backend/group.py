"""The process group for torch.distributed: its beginning, members, messages and end."""

# torch's stubs list operations twice, as they are called from C++ and as they may be called from Python.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from tutti.comm.base import ANY
from tutti.comm.mpi.collectives import HierarchicalCollectives
from tutti.comm.mpi.discovery import host_key, join_host
from tutti.comm.mpi.group import Membership, MpiGroup
from tutti.comm.mpi.transport import MpiMessages
from tutti.comm.shm.collectives import SHORT, HostCollectives
from tutti.comm.shm.liveness import LEFT_EARLY, Peers
from tutti.comm.shm.point_to_point import HostMessages, Receiving
from tutti.errors import PeerLost
from tutti.torch_backend.collectives import GroupCollectives, Tensors, asynchronous, chain, listed
from tutti.torch_backend.cpp_stub import register_stub
from tutti.torch_backend.errors import Unusable
from tutti.torch_backend.progress import ProgressEngine
from tutti.torch_backend.rendezvous import GroupStore, join_by_mpi
from tutti.torch_backend.staging import Staging
from tutti.torch_backend.work import Operation

_open: Final[weakref.WeakSet[TuttiGroup]] = weakref.WeakSet()


class TuttiGroup(GroupCollectives):
    """One rank's end of a process group; TuttiError if a rank did not come, or the ranks share no memory."""

    _messages: HostMessages | MpiMessages
    _membership: Membership | None = None
    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def __init__(self, store: Store, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> None:
        size = len(global_ranks)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._global_ranks, self._store = rank, size, tuple(global_ranks), store
        self._name, self._description = "", ""
        self._stub = register_stub(self, timeout)
        self._owner = os.getpid()
        group_store = GroupStore(
            store, rank, self._global_ranks, timeout.total_seconds(), _check_rank_of_world
        )
        keys = group_store.gather(host_key())
        self._group, hosts = join_host(rank, keys, group_store.gather, self._global_ranks)
        self._peers = Peers(self._group, timeout.total_seconds(), None)
        # A few of many ranks may be fewer than the cores, and have none for themselves all the same.
        self._peers.crowded |= any(group._peers.crowded for group in _open)
        rows = HostCollectives(self._group, self._peers.crowded)
        if len(hosts) == 1:
            self._transport, self._short_all_reduce = rows, rows.short_all_reduce
            self._short = SHORT if size > 1 else -1
            self._messages = HostMessages(self._group)
        else:
            self._connect_hosts(join_by_mpi(group_store, self._global_ranks, keys), hosts, rows)
        self._progress = ProgressEngine(
            self._peers,
            self._global_ranks,
            self._transport.absent,
            (self._membership or self._group).has_left,
            timeout.total_seconds(),
            remote=len(hosts) > 1,
        )
        _open.add(self)

    def _connect_hosts(self, mpi: MpiGroup, hosts: Sequence[Sequence[int]], rows: HostCollectives) -> None:
        self._membership = Membership(mpi, self._rank, self._global_ranks, self._peers)
        self._transport = HierarchicalCollectives(self._membership, rows, hosts)
        self._messages = MpiMessages(self._membership)

    # --- names

    def rank(self) -> int:
        """Return the number of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    def name(self) -> str:
        """Return the backend's name."""
        return "tutti"

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        """Return the group's name, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the group's description, for C++."""
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name = pg_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes; the first is preferred where any would do."""
        accelerators = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *accelerators]

    def get_group_store(self) -> Store:
        """Return the store that the ranks met in."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: mismatched calls are always found."""

    def __repr__(self) -> str:
        return f"TuttiGroup(rank {self._rank} of {self._size}, ranks {list(self._global_ranks)} of the job)"

    # --- barriers

    def barrier(
        self, options: Any = None, timeout: timedelta | None = None, *, opts: Any = None
    ) -> Operation | None:
        """Wait until every rank has called this; Absent names the ranks that did not come in time."""
        options = opts if options is None else options
        if isinstance(options, timedelta):
            options, timeout = None, options
        limit_s = _limit_s(getattr(options, "timeout", None) if timeout is None else timeout)
        steps = self._transport.barrier()
        return self._progress.collective(steps, (), "barrier", asynchronous(options), limit_s)

    # --- messages

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Operation:
        """Send a tensor to a rank of the group."""
        staging, (tensor,) = Staging(), listed(tensors)
        self._check_rank("send", to)
        vector = staging.take(tensor, write=False)
        steps = self._messages.send(vector, to, tag)
        return self._progress.message(steps, [tensor], f"send to rank {self._global_ranks[to]}", lambda: [to])

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Operation:
        """Receive a tensor from a rank of the group."""
        self._check_rank("recv", source)
        what = f"recv from rank {self._global_ranks[source]}"
        return self._receive(tensors, Receiving(source, tag), what, [source])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Operation:
        """Receive a tensor from the first rank that sends one."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return self._receive(tensors, Receiving(ANY, tag), "recv from any rank", others)

    def _receive(self, tensors: Tensors, receiving: Receiving, what: str, needed: list[int]) -> Operation:
        staging, (tensor,) = Staging(), listed(tensors)
        steps = self._messages.recv(staging.take(tensor, read=False), receiving)
        return self._progress.message(chain([steps], staging), [tensor], what, lambda: needed, receiving)

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise Unusable(
                f"{what} names rank {rank}, but the group has {self._size}; give 0 to {self._size - 1}"
            )

    # --- the end

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch asks for the abilities of a group: this group where there is no stub."""
        return self if self._stub is None else super()._get_backend(device)

    def shutdown(self) -> None:
        """Leave: operations under way fail, and the group frees its resources."""
        if self in _open:
            _open.discard(self)
            self._progress.close()
            if self._membership is not None:
                why = self._progress._broken
                self._membership.leave(why.ranks if isinstance(why, PeerLost) else ())
            self._group.leave()
            self._peers.close()
            self._group.arena.close()

    abort = shutdown


def _check_rank_of_world(name: int) -> None:
    """Raise PeerLost if a rank is lost or has left, so that it cannot come to a new group."""
    world = distributed.GroupMember.WORLD
    if not isinstance(world, TuttiGroup) or world not in _open:
        return
    world._peers.check()
    if (world._membership or world._group).has_left(name):
        raise PeerLost([name], LEFT_EARLY)


def _limit_s(timeout: timedelta | None) -> float | None:
    """Return a time-out in seconds; None for the group's, which torch passes as a negative one."""
    return timeout.total_seconds() if timeout is not None and timeout >= timedelta(0) else None


@atexit.register
def _leave() -> None:
    """Leave all groups in an orderly way, and let their threads end."""
    for group in list(_open):
        if group._owner == os.getpid():
            group.shutdown()
