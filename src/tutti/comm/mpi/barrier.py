"""The barrier of ranks on several hosts, at which each says which collective it calls.

    host a   rank 0 ┐         ┌ tells host b what its ranks call ┐         ┌ all see what all have called
             rank 1 ┴ barrier ┤                                  ├ barrier ┤
    host b   rank 2 ┐         ├ tells host a what its ranks call ┤         │
             rank 3 ┴ barrier ┴                                  ┴ barrier ┴

So only two messages cross, for any number of ranks. A short vector travels with the call: the first
rank of each host reduces those of its host, and then those of all hosts, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy
import torch
from torch import Tensor

from tutti.comm.mpi.group import Membership
from tutti.comm.mpi.transport import HEADERS, MpiRequests, Request
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.barrier import Call, Steps, disagreement
from tutti.comm.shm.collectives import HostCollectives
from tutti.comm.shm.rings import as_bytes

PATIENCE_S: Final = 0.02
"""Time to wait for a host's own ranks before the other hosts are told which have come so far."""

_ABSENT: Final = -1

SHORT_BYTES: Final = 64 << 10
"""The most bytes that a host sends to others in one step; with the call, if that is checked."""

Fold = Callable[[Sequence[Tensor]], Tensor]
"""Reduces several short vectors to one, in the place of one of them."""


class HostState:
    """The state of a group's collectives in the memory of one host.

    ┌ claims ────────┬ shorts ────────┬ calls ──────────┬ arrivals ───────┬ result ─────┐
    │ what each rank │ a short vector │ what each rank  │ how far each    │ of all      │
    │ of this host   │ of each rank   │ of all called   │ rank is known   │ short       │
    │ calls          │ of this host   │                 │ to be           │ vectors     │
    └────────────────┴────────────────┴─────────────────┴─────────────────┴─────────────┘

    Claims and shorts are written by the ranks themselves, before the barrier of their host; all the rest by
    the first of them, before the next such barrier.

    Args:
        arena: the memory that the ranks of this host share.
        place: the offset in it of the state, which has `host_state_bytes`.
        local_size: the number of ranks of this host.
        size: the number of ranks in all.

    Attributes:
        claims: the call of each rank of this host.
        calls: the call of each rank of the group.
        arrivals: the number of collectives that each rank is known to have begun.
    """

    def __init__(self, arena: Arena, place: int, local_size: int, size: int) -> None:
        words = arena.words(place, 2 * size + local_size)
        self.calls, self.arrivals, self.claims = words[:size], words[size : 2 * size], words[2 * size :]
        # Tensors that are made in inference mode can be written only in that mode.
        with torch.inference_mode(False):
            memory = arena.tensor(
                place + _words_bytes(local_size, size), (local_size + 1, SHORT_BYTES), torch.uint8
            )
        self._shorts: list[Tensor] = list(memory[:-1])
        self._result: Tensor = memory[-1]

    def short(self, local_rank: int, like: Tensor) -> Tensor:
        """The place of a short vector of a rank of this host."""
        return self._shorts[local_rank][: like.nbytes].view(like.dtype)

    def result(self, like: Tensor) -> Tensor:
        """The place of the short result of all ranks."""
        return self._result[: like.nbytes].view(like.dtype)


def host_state_bytes(local_size: int, size: int) -> int:
    """The number of bytes of the arena that the state needs."""
    return _words_bytes(local_size, size) + (local_size + 1) * SHORT_BYTES


def _words_bytes(local_size: int, size: int) -> int:
    return 8 * (2 * size + local_size)


class ShortVector(NamedTuple):
    """A short vector that travels with a call, and how it is reduced.

    Attributes:
        vector: this rank's, of up to SHORT_BYTES; those of all ranks have one length.
        here: reduces those of a host's ranks.
        everywhere: reduces those of the hosts, in their order, to the result.
    """

    vector: Tensor
    here: Fold
    everywhere: Fold


class HierarchicalBarrier:
    """The barrier of a group whose ranks are on several hosts, in one of its ranks.

    Args:
        membership: of the group.
        rows: the collectives of this host's ranks.
        state: the memory that the ranks of this host share.
        hosts: the group's ranks on each host.
        checked: whether ranks that call different things are told so in every collective. If not, only in
            those that need the barrier: the others save it, as MPI keeps the order of vectors.
        mismatch: the error that the ranks have called different things.
    """

    def __init__(
        self,
        membership: Membership,
        rows: HostCollectives,
        state: HostState,
        hosts: Sequence[Sequence[int]],
        checked: bool = True,
        mismatch: type[Exception] = ValueError,
    ) -> None:
        self.rank, self.size = membership.rank, len(membership.global_ranks)
        self._membership, self._requests = membership, MpiRequests(membership, membership.mpi.collectives)
        self._rows, self._host_state, self._hosts = rows, state, hosts
        self._checked, self._mismatch = checked, mismatch
        self._host = next(number for number, members in enumerate(hosts) if self.rank in members)
        self._here, self._lanes = hosts[self._host], min(map(len, hosts))
        self._lane, self._global_ranks = self._here.index(self.rank), membership.global_ranks
        self._leaders = {members[0]: members for members in hosts if members is not self._here}
        self._outbox = numpy.zeros(8 * len(self._here) + SHORT_BYTES, numpy.uint8)
        self._inboxes = {
            leader: numpy.zeros(8 * len(members) + SHORT_BYTES, numpy.uint8)
            for leader, members in self._leaders.items()
        }
        self._complete = True

    def absent(self) -> list[int]:
        """The ranks that are not, or will never be, where this one waits."""
        early = self._membership.early()
        here = [self._here[local] for local in self._rows.absent()]
        if early or not self._complete:
            return early or here
        arrivals, begun = self._host_state.arrivals, self._membership.begun
        late = [rank for rank in range(self.size) if arrivals[rank] < begun] if self._checked else []
        return late or here or self._requests.awaited

    def _is_short(self, vector: Tensor) -> bool:
        """Return whether all of a vector goes to every other host at once."""
        return vector.nbytes * (len(self._hosts) - 1) <= SHORT_BYTES

    def _agree(self, call: Call) -> Steps:
        """Before a collective: wait for all ranks, and check that they have called the same.

        Raises:
            ValueError: (or what `mismatch` is) a rank has called something else.
        """
        if self._checked:
            yield from self._wait(call)

    def _wait_with(self, call: Call, short: ShortVector) -> Generator[bool, None, Tensor]:
        """Wait for all ranks; return the reduction of the short vectors, valid until the next barrier."""
        state = self._host_state
        state.short(self._lane, short.vector).copy_(short.vector)
        yield from self._wait(call, short)
        return state.result(short.vector)

    def _wait(self, call: Call, short: ShortVector | None = None) -> Steps:
        state, alone = self._host_state, len(self._here) == 1
        state.claims[self._lane] = call
        self._complete = alone
        if not alone:
            yield from self._wait_for_host()
            self._complete = True
        if not self._lane:
            yield from self._exchange_calls(short)
        if not alone:
            yield from self._rows.barrier()
        for rank, theirs in enumerate(state.calls):
            if theirs != call:
                raise self._mismatch(
                    disagreement(self._global_ranks[self.rank], call, self._global_ranks[rank], Call(theirs))
                )

    def _wait_for_host(self) -> Steps:
        """Wait for the ranks of this host; meanwhile tell the other hosts which have come."""
        told, since = list[int](), time.monotonic()
        for moved in self._rows.barrier():
            if not self._lane and time.monotonic() - since > PATIENCE_S:
                absent = self._rows.absent()
                if absent and absent != told:
                    told = absent
                    yield from self._requests.finish(self._send_calls(absent, None))
            yield moved

    def _send_calls(self, absent: Sequence[int], vector: Tensor | None) -> list[Request]:
        """Begin to send the calls of this host's ranks to the others; _ABSENT where one has not come."""
        count, state = len(self._here), self._host_state
        words = [_ABSENT if local in absent else claim for local, claim in enumerate(state.claims)]
        self._outbox[: 8 * count].view(numpy.int64)[:] = words
        length = 8 * count
        if vector is not None:
            torch.from_numpy(self._outbox)[length : length + vector.nbytes].copy_(as_bytes(vector))
            length += vector.nbytes
        return [self._requests.send(self._outbox[:length], leader, HEADERS) for leader in self._leaders]

    def _exchange_calls(self, short: ShortVector | None) -> Steps:
        """Exchange the calls of all ranks between the first ranks of the hosts."""
        coming = [self._requests.recv(inbox, leader, HEADERS) for leader, inbox in self._inboxes.items()]
        state, own = self._host_state, None
        if short is not None and len(set(state.claims)) == 1:
            shorts = [state.short(local, short.vector) for local in range(len(self._here))]
            own = short.here(shorts) if len(shorts) > 1 else shorts[0]
        going = self._send_calls((), own)
        self._record(self._here, state.claims)
        for leader, request in zip(self._leaders, coming, strict=True):
            yield from self._receive_calls(leader, request)
        yield from self._requests.finish(going)
        if short is not None and own is not None and len(set(state.calls)) == 1:
            found = [self._found(members, own) for members in self._hosts]
            state.result(own).copy_(short.everywhere(found))

    def _receive_calls(self, leader: int, request: Request) -> Steps:
        """Wait for the calls of another host's ranks."""
        members, inbox = self._leaders[leader], self._inboxes[leader]
        words = inbox[: 8 * len(members)].view(numpy.int64)
        while True:
            yield from self._requests.finish([request])
            self._record(members, words.tolist())
            if (words != _ABSENT).all():
                return
            request = self._requests.recv(inbox, leader, HEADERS)

    def _record(self, members: Sequence[int], words: Sequence[int] | memoryview) -> None:
        """Record the calls of a host's ranks; _ABSENT for ranks that have not come."""
        for rank, word in zip(members, words, strict=True):
            if word != _ABSENT:
                self._host_state.calls[rank], self._host_state.arrivals[rank] = word, self._membership.begun

    def _found(self, members: Sequence[int], own: Tensor) -> Tensor:
        """The reduced short vectors of a host's ranks."""
        if members is self._here:
            return own
        inbox: Any = self._inboxes[members[0]]
        begin = 8 * len(members)
        return torch.from_numpy(inbox)[begin : begin + own.nbytes].view(own.dtype)
