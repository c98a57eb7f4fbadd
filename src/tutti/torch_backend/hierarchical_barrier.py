"""How ranks on several hosts wait for each other, each saying what it calls.

    host a   rank 0 ┐         ┌ tells host b what its ranks call ┐         ┌ all see what all have called
             rank 1 ┴ barrier ┤                                  ├ barrier ┤
    host b   rank 2 ┐         ├ tells host a what its ranks call ┤         │
             rank 3 ┴ barrier ┴                                  ┴ barrier ┴

So two messages cross, whatever the number of ranks. A short vector travels with the call: what a host's ranks
make together is made by the first of them, and what the hosts make together on every host, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy
import torch
from torch import Tensor

from tutti.comm.shm.barrier import Call, Steps, disagreement
from tutti.comm.shm.collectives import HostCollectives
from tutti.comm.shm.rings import as_bytes
from tutti.torch_backend.errors import Mismatch
from tutti.torch_backend.host_state import SHORT, Board
from tutti.torch_backend.mpi_requests import HEADERS, Request, Wire

PATIENCE_S: Final = 0.02
"""How long to wait for a host's own ranks before the others are told who has come so far."""

_ABSENT: Final = -1

Fold = Callable[[Sequence[Tensor]], Tensor]
"""Makes one short vector of several, in the place of one of them."""


class Short(NamedTuple):
    """What travels with a call.

    Attributes:
        vector: this rank's, of up to SHORT bytes; all ranks' are of one length.
        here: makes one vector of those of a host's ranks.
        everywhere: makes the result of those of the hosts, in their order.
    """

    vector: Tensor
    here: Fold
    everywhere: Fold


class WideRollCall:
    """The meetings of a group's ranks, as one of them sees them.

    Args:
        wire: to the ranks of other hosts.
        rows: of this host's ranks.
        board: of this host.
        hosts: the group's ranks on each host.
        rank: this process's number in the group.
        names: what the group's ranks are called in errors: their numbers in the job.

    Attributes:
        begun: how many collectives this rank has begun.
    """

    def __init__(
        self,
        wire: Wire,
        rows: HostCollectives,
        board: Board,
        hosts: Sequence[Sequence[int]],
        rank: int,
        names: Sequence[int],
    ) -> None:
        self._wire, self._rows, self._board, self._hosts, self._rank = wire, rows, board, hosts, rank
        self._here = next(members for members in hosts if rank in members)
        self._leads, self._names = rank == self._here[0], tuple(names)
        self._leaders = {members[0]: members for members in hosts if members is not self._here}
        self._outbox = numpy.zeros(8 * len(self._here) + SHORT, numpy.uint8)
        self._inboxes = {
            leader: numpy.zeros(8 * len(members) + SHORT, numpy.uint8)
            for leader, members in self._leaders.items()
        }
        self._complete = True
        self.begun = 0

    def absent(self) -> list[int]:
        """The ranks that are not, or will never be, where this one waits."""
        early = self._wire.departures.early(self.begun)
        here = [self._here[local] for local in self._rows.absent()]
        if early or not self._complete:
            return early or here
        arrivals = self._board.arrivals
        late = [rank for rank in range(len(self._names)) if arrivals[rank] < self.begun]
        return late or here or self._wire.awaited

    def meet(self, call: Call) -> Steps:
        """Wait for all ranks, and see that they have called the same.

        Raises:
            Mismatch: somebody has called something else.
        """
        yield from self._meet(call, None)

    def meet_with(self, call: Call, short: Short) -> Generator[bool, None, Tensor]:
        """As `meet`; returns what is made of the short vectors, valid until the next meeting."""
        board = self._board
        board.short(self._here.index(self._rank), short.vector).copy_(short.vector)
        yield from self._meet(call, short)
        return board.result(short.vector)

    def _meet(self, call: Call, short: Short | None) -> Steps:
        board, alone = self._board, len(self._here) == 1
        board.claims[self._here.index(self._rank)] = call
        self._complete = alone
        if not alone:
            yield from self._assemble()
            self._complete = True
        if self._leads:
            yield from self._confer(short)
        if not alone:
            yield from self._rows.barrier()
        for rank, theirs in enumerate(board.calls):
            if theirs != call:
                raise Mismatch(disagreement(self._names[self._rank], call, self._names[rank], Call(theirs)))

    def _assemble(self) -> Steps:
        """Wait for the ranks of this host; meanwhile tell the other hosts who has come."""
        told, since = list[int](), time.monotonic()
        for moved in self._rows.barrier():
            if self._leads and time.monotonic() - since > PATIENCE_S:
                absent = self._rows.absent()
                if absent and absent != told:
                    told = absent
                    yield from self._wire.finish(self._tell(absent, None))
            yield moved

    def _tell(self, absent: Sequence[int], vector: Tensor | None) -> list[Request]:
        """Begin to tell the other hosts what this one's ranks call, and _ABSENT for who has not come."""
        count, board = len(self._here), self._board
        words = [_ABSENT if local in absent else claim for local, claim in enumerate(board.claims)]
        self._outbox[: 8 * count].view(numpy.int64)[:] = words
        length = 8 * count
        if vector is not None:
            torch.from_numpy(self._outbox)[length : length + vector.nbytes].copy_(as_bytes(vector))
            length += vector.nbytes
        return [self._wire.send(self._outbox[:length], leader, HEADERS) for leader in self._leaders]

    def _confer(self, short: Short | None) -> Steps:
        """On the first rank of each host: learn what the ranks of the others call."""
        coming = [self._wire.recv(inbox, leader, HEADERS) for leader, inbox in self._inboxes.items()]
        board, own = self._board, None
        if short is not None and len(set(board.claims)) == 1:
            shorts = [board.short(local, short.vector) for local in range(len(self._here))]
            own = short.here(shorts) if len(shorts) > 1 else shorts[0]
        going = self._tell((), own)
        self._note(self._here, board.claims)
        for leader, request in zip(self._leaders, coming, strict=True):
            yield from self._hear(leader, request)
        yield from self._wire.finish(going)
        if short is not None and own is not None and len(set(board.calls)) == 1:
            found = [self._found(members, own) for members in self._hosts]
            board.result(own).copy_(short.everywhere(found))

    def _hear(self, leader: int, request: Request) -> Steps:
        """Wait for what the ranks of a host call."""
        members, inbox = self._leaders[leader], self._inboxes[leader]
        words = inbox[: 8 * len(members)].view(numpy.int64)
        while True:
            yield from self._wire.finish([request])
            self._note(members, words.tolist())
            if (words != _ABSENT).all():
                return
            request = self._wire.recv(inbox, leader, HEADERS)

    def _note(self, members: Sequence[int], words: Sequence[int] | memoryview) -> None:
        """Write on the board what the ranks of a host call; _ABSENT for who has not come."""
        for rank, word in zip(members, words, strict=True):
            if word != _ABSENT:
                self._board.calls[rank], self._board.arrivals[rank] = word, self.begun

    def _found(self, members: Sequence[int], own: Tensor) -> Tensor:
        """What the ranks of a host have made of their short vectors."""
        if members is self._here:
            return own
        inbox: Any = self._inboxes[members[0]]
        begin = 8 * len(members)
        return torch.from_numpy(inbox)[begin : begin + own.nbytes].view(own.dtype)
