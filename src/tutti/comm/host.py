"""The processes of one machine, over the arena and nothing else: no MPI, no port, no file.

Collectives on private vectors pass them through two sets of scratch rows, one row per rank, used in turn:

    rank 0   copy into row 0 of set A ┐         ┌ sum its slice of rows ┐         ┌ copy out
    rank 1   copy into row 1 of set A ┴ barrier ┴ sum its slice of rows ┴ barrier ┴ copy out    set B is next

A rank that is back in set A has passed a barrier in set B, which nobody enters before they are done with set
A. So no further barrier is needed. Sums are formed in rank order, each element by one rank alone or by all in
the same way: the result is the same on every rank and in every run.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, cast

import cloudpickle
import torch
from torch import Tensor

from tutti.comm.arena import Arena
from tutti.comm.base import ANY, Communicator, cut
from tutti.comm.control import CALLS, EPOCH, LEFT, ROW, Layout, control_bytes
from tutti.comm.counting import HostCounter
from tutti.comm.fence import ORDERED, fence
from tutti.comm.post import Post
from tutti.comm.signature import Operation, Signature
from tutti.comm.waiting import SPINS, Peers, wait

SMALL: Final = 4 << 10
"""Bytes up to which every rank sums all of a vector itself, which saves a barrier."""

JOIN_TIMEOUT_S: Final = 120.0


class HostCommunicator(Communicator):
    """The ranks of one machine. Joining is collective: it returns when all ranks have come.

    For one thread of each rank. After an error in a collective no further operation is possible.

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
        self._arena, self._block, self._layout = arena, block, Layout(size)
        self._names = tuple(range(size) if names is None else names)
        self._words = arena.words(block, self._layout.words)
        self._scratch = arena.tensor(block + self._layout.scratch, (2, size, ROW), torch.uint8)
        self._rows: dict[torch.dtype, list[list[Tensor]]] = {}
        self._set = 0
        self._epoch = 0
        self._own = self._layout.line(rank)
        others = [(rank + step) % size for step in range(1, size)]
        self._others = tuple((other, self._layout.line(other) + EPOCH) for other in others)
        self._cross: HostCommunicator | None = None
        self._closed = self._owns_arena = False
        self._whole = peers is None
        self._peers = peers or Peers(self._words, rank, size, self._names, join_timeout_s, cores)
        self._spins = 0 if self._peers.crowded else SPINS
        self._post = Post(arena, block, self._words, rank, self._names, self._peers)

    @classmethod
    def alone(cls) -> HostCommunicator:
        """A world of one, with an arena of its own."""
        arena = Arena.create()
        comm = cls(arena, arena.allocate(control_bytes(1)), 0, 1)
        comm._owns_arena = True
        return comm

    # --- collectives

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._epoch = epoch = self._epoch + 1
        words = self._words
        if not ORDERED:
            fence()
        words[self._own] = epoch
        for other, word in self._others:
            if words[word] < epoch:
                self._wait_for_epoch(other, word, epoch)
        if not ORDERED:
            fence()

    def _wait_for_epoch(self, other: int, word: int, epoch: int) -> None:
        words = self._words
        for _ in range(self._spins):
            if words[word] >= epoch:
                return
        wait(lambda: words[word] >= epoch, self._peers, words, [(other, self._names[other])])

    def _next_rows(self, dtype: torch.dtype) -> list[Tensor]:
        """The scratch rows that may be written now: one of ROW bytes for each rank."""
        self._set ^= 1
        if dtype not in self._rows:
            self._rows[dtype] = [list(rows) for rows in self._scratch.view(dtype)]
        return self._rows[dtype][self._set]

    def _meet(self, call: Signature) -> None:
        """The barrier of a collective's first piece.

        Raises:
            ValueError: another rank called something else.
        """
        word, words = self._own + CALLS + self._set, self._words
        words[word] = call
        self.barrier()
        for other, line in self._others:
            if words[line + CALLS + self._set] != call:
                theirs = Signature(words[line + CALLS + self._set])
                raise ValueError(
                    f"rank {self.rank} called {call} while rank {other} called {theirs}; all ranks must call "
                    f"the same collectives in the same order"
                )

    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        """Overwrite `vector` on every rank with that of rank `root`."""
        self._check(vector)
        self._check_rank(root)
        length = vector.numel()
        slices = [slice(0, length if rank == root else 0) for rank in range(self.size)]
        self._exchange(vector, slices, Signature.of(Operation.BROADCAST, vector.dtype, length, root))

    def all_gather(self, vector: Tensor) -> None:
        """Every rank owns its slice, `cut(len(vector), size)[rank]`; fill in the others' slices."""
        self._check(vector)
        call = Signature.of(Operation.ALL_GATHER, vector.dtype, vector.numel())
        self._exchange(vector, cut(vector.numel(), self.size), call)

    def _exchange(self, vector: Tensor, slices: Sequence[slice], call: Signature) -> None:
        """Fill in the others' slices of `vector`."""
        if self.size == 1:
            return
        longest = max(part.stop - part.start for part in slices)
        most = ROW // vector.dtype.itemsize
        for begin in range(0, max(longest, 1), most):
            pieces = [
                vector[min(s.start + begin, s.stop) : min(s.start + begin + most, s.stop)] for s in slices
            ]
            rows = self._next_rows(vector.dtype)
            own = pieces[self.rank]
            if len(own):
                rows[self.rank][: len(own)].copy_(own)
            self._meet(call)
            for other, _ in self._others:
                piece = pieces[other]
                if len(piece):
                    piece.copy_(rows[other][: len(piece)])

    def all_reduce(self, vector: Tensor) -> None:
        """Overwrite `vector` on every rank with the sum over the ranks; bit-equal on all of them."""
        self._check(vector)
        if self.size == 1:
            return
        length, most = vector.numel(), ROW // vector.dtype.itemsize
        call = Signature.of(Operation.ALL_REDUCE, vector.dtype, length)
        if vector.nbytes <= SMALL:
            rows = self._next_rows(vector.dtype)
            rows[self.rank][:length].copy_(vector)
            self._meet(call)
            _sum([row[:length] for row in rows], vector)
            return
        for piece in torch.split(vector, most):
            rows = self._next_rows(vector.dtype)
            rows[self.rank][: len(piece)].copy_(piece)
            self._meet(call)
            own = cut(len(piece), self.size)[self.rank]
            _sum([row[own] for row in rows], rows[0][own])
            self.barrier()
            piece.copy_(rows[0][: len(piece)])

    def reduce_scatter(self, vector: Tensor) -> None:
        """Overwrite this rank's slice, `cut(len(vector), size)[rank]`, with the sum over the ranks."""
        self._check(vector)
        if self.size == 1:
            return
        call = Signature.of(Operation.REDUCE_SCATTER, vector.dtype, vector.numel())
        slices = cut(vector.numel(), self.size)
        most = ROW // vector.dtype.itemsize // self.size
        for begin in range(0, max(slices[0].stop, 1), most):
            pieces = [
                vector[min(s.start + begin, s.stop) : min(s.start + begin + most, s.stop)] for s in slices
            ]
            rows = self._next_rows(vector.dtype)
            for owner, piece in enumerate(pieces):
                rows[self.rank][owner * most : owner * most + len(piece)].copy_(piece)
            self._meet(call)
            own = pieces[self.rank]
            _sum([row[self.rank * most : self.rank * most + len(own)] for row in rows], own)

    def broadcast_object(self, value: object, root: int = 0) -> object:
        """The picklable `value` of rank `root`, on every rank."""
        self._check_rank(root)
        data = cloudpickle.dumps(value) if self.rank == root else b""
        found = self._exchange_bytes(data, Signature.of(Operation.BROADCAST_OBJECT, torch.uint8, 0, root))
        return value if self.rank == root else pickle.loads(found[root])

    def all_gather_objects(self, value: object) -> list[object]:
        """The picklable values of all ranks, in rank order, on every rank."""
        call = Signature.of(Operation.ALL_GATHER_OBJECTS, torch.uint8, 0)
        return [pickle.loads(data) for data in self._exchange_bytes(cloudpickle.dumps(value), call)]

    def _exchange_bytes(self, data: bytes, call: Signature) -> list[memoryview]:
        lengths = self._exchange_words(len(data), call)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        slices = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
        vector = torch.empty(ends[-1], dtype=torch.uint8)
        if data:
            vector[slices[self.rank]].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._exchange(vector, slices, call)
        whole = vector.numpy()
        return [whole[part].data for part in slices]

    def _exchange_words(self, word: int, call: Signature) -> list[int]:
        rows = self._next_rows(torch.int64)
        rows[self.rank][0] = word
        self._meet(call)
        return [int(row[0]) for row in rows]

    # --- messages

    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector`; returns when it may be overwritten.

        Messages to one rank with one tag keep their order. Some 200 KB are buffered. Two
        ranks that send to each other at the same time do not block each other.
        """
        self._check(vector)
        self._check_rank(to)
        self._post.send(vector, to, tag)

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
        return self._post.recv(vector, source, tag)

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
        self._post.exchange(outgoing, to, incoming, source, tag)

    def waiting(self, tag: int = 0, source: int = ANY) -> int | None:
        """Who has sent a message with this tag that lies here unread, or None; never waits for one."""
        if source != ANY:
            self._check_rank(source)
        return self._post.waiting(tag, source)

    # --- shared memory

    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros that every rank of this host sees (collective)."""
        count = 1
        for length in shape:
            count *= length
        offset = self._allocate(count * dtype.itemsize, Signature.of(Operation.SHARED, dtype, count))
        return self._arena.tensor(offset, shape, dtype)

    def counter(self) -> HostCounter:
        """A counter at zero that every rank of the communicator sees (collective)."""
        return HostCounter(self._arena, self._allocate(8, Signature.of(Operation.COUNTER, torch.int64, 1)))

    def locks(self, count: int) -> list[AbstractContextManager[None]]:
        """So many locks for the ranks of this host, not their threads (collective)."""
        offset = self._allocate(count, Signature.of(Operation.LOCK, torch.uint8, count))
        return [self._arena.lock(offset + number) for number in range(count)]

    def _allocate(self, nbytes: int, call: Signature) -> int:
        offset = self._arena.allocate(nbytes) if self.rank == 0 else 0
        return self._exchange_words(offset, call)[0]

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
        blocks = self._exchange_words(block, Signature.of(Operation.SPLIT, torch.int64, 1))
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
        with self._arena.lock(self._block):
            self._words[self._own + LEFT] = 1
            everyone = [self._words[self._layout.line(rank) + LEFT] for rank in range(self.size)]
        if not self._whole and all(everyone):
            self._arena.release(self._block, self._layout.nbytes)
        if self._whole:
            self._peers.close()
        if self._owns_arena:
            self._arena.close()

    # --- arguments

    def _check(self, vector: Tensor) -> None:
        if vector.dim() != 1 or not vector.is_contiguous() or vector.device.type != "cpu":
            raise ValueError(
                f"a vector must be one-dimensional, contiguous and on the CPU; this one has shape "
                f"{tuple(vector.shape)}, strides {vector.stride()} and is on {vector.device}; "
                f"pass vector.contiguous().view(-1)"
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in a communicator of size {self.size}")


def _sum(rows: Sequence[Tensor], out: Tensor) -> None:
    """Overwrite `out` with the sum over `rows`, in their order; `out` may be the first of them."""
    if out.dtype.is_floating_point and out.dtype.itemsize < 4:
        total = rows[0].float()
        for row in rows[1:]:
            total += row
        out.copy_(total)
        return
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out += row


def _members(choices: list[object], color: int | None) -> list[int]:
    """The ranks that chose `color`, ordered by (key, rank)."""
    pairs = enumerate(cast("list[tuple[int | None, int]]", choices))
    return [rank for _, rank in sorted((key, rank) for rank, (chosen, key) in pairs if chosen == color)]
