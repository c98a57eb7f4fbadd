"""The collectives of the ranks of one host, over the arena only.

Vectors pass through two sets of rows, A and B, one row per rank in each. A short all-reduce is [1] put, [2]
barrier, [3] sum all of it; a longer one is cut into slices, and each rank sums its own:

    rank 0   [1] put slice 1 into row 0 ┐             ┌ [3] sum slice 0 ┐             ┌ [5] take slice 1
    rank 1   [1] put slice 0 into row 1 ┴ [2] barrier ┴ [3] sum slice 1 ┴ [4] barrier ┴ [5] take slice 0

All others (gather, broadcast, ...) are [1] put, [2] barrier, [5] take. Rows carry no flags: that
a put is seen before what is made of it rests on the order of the barrier's words (`barrier`, whose [1] and
[6] are the puts and takes here).

Two sets suffice, without a barrier after the last step. Collectives use A and B in turn, each passes at least
one barrier between its puts and its takes, and so:

    a rank puts into A again ─── after it passed the barrier of the collective in B
    which every rank enters  ─── after it has taken what it wanted of A

With one set, a fast rank's next [1] would overwrite what a slow rank has not yet taken in [3] or [5]. In [3]
the owner of a slice stores the sum where it has read that slice before, in a row of set A: of that place
no other rank reads anything before [4].

Sums are formed in rank order, each element by one rank only or by all in the same way, so that they are
bit-equal everywhere.

Bytes are moved by the C library: it takes an address where torch would have to make a view, and it stores
whole cache lines without fetching them first from the core that had them last. Such stores (non-temporal, or
`rep movsb`) do not keep the order of x86 among each other, but they do with the flag that follows: glibc ends
the former with SFENCE, and the latter is ordered with a later store (Intel, Software Developer's
Manual, volume 3A, "Fast-string operation and out-of-order stores").
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import Final

import torch
from torch import Tensor

from tutti.comm.base import cut
from tutti.comm.reductions import Reduction
from tutti.comm.shm.barrier import Call, Collective, HostBarrier, Steps, agree_on_lengths
from tutti.comm.shm.layout import ROW, HostGroup

move: Final = ctypes.CDLL(None).memmove
"""`memmove` of the C library. Other threads run meanwhile: `CDLL` lets go of the GIL."""

move_few: Final = ctypes.PyDLL(None).memmove
"""The same for few bytes: `PyDLL` holds the GIL, as releasing it would take longer than the move."""

for _function in (move, move_few):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None

_Stretch = tuple[int, int, int]
"""The address of a place in a row, the offset in bytes of its content in the vector, and its bytes."""


class Piece:
    """A piece of a vector; each rank owns a slice of it."""

    def __init__(self, rank: int, rows: Sequence[Tensor], begin: int, length: int) -> None:
        def stretch(row: Tensor, part: slice) -> _Stretch:
            item = row.itemsize
            at, nbytes = begin + part.start, part.stop - part.start
            return row.data_ptr() + part.start * item, at * item, nbytes * item

        slices = cut(length, len(rows))
        own = slices[rank]
        others = [(owner, part) for owner, part in enumerate(slices) if owner != rank]
        self._rank, self._own = rank, slice(begin + own.start, begin + own.stop)
        self._found = [row[own] for row in rows]
        self._mine = stretch(rows[_home(rank)], own)
        self._given = [stretch(rows[rank], part) for _, part in others]
        self._made = [stretch(rows[_home(owner)], part) for owner, part in others]

    def put(self, vector: int) -> None:
        """Put the others' slices of the vector at this address into the rows."""
        for place, offset, nbytes in self._given:
            move(place, vector + offset, nbytes)

    def fold(self, vector: Tensor, reduction: Reduction) -> None:
        """Reduce the slice that this rank owns, here and for the others."""
        found, own = [*self._found], vector[self._own]
        found[self._rank] = own
        # `fold` overwrites the result with the sum of the first two rows before it reads the third. So from
        # rank 2 on the first row, which was read already, is the result.
        result = own if self._rank < 2 else found[0]
        reduction.fold(found, result)
        if result is own:
            place, _, nbytes = self._mine
            move(place, own.data_ptr(), nbytes)
        else:
            own.copy_(result)

    def take(self, vector: int) -> None:
        """Copy the slices that the others have reduced into the vector at this address."""
        for place, offset, nbytes in self._made:
            move(vector + offset, place, nbytes)


def _home(owner: int) -> int:
    """Return the row for the result of a slice's owner: one that it has read, and has in its cache."""
    return 0 if owner else 1


_ShortPlan = tuple[Call, list[list[tuple[list[Tensor], int]]]]
_Plan = list[list[Piece]]
_Moves = Sequence[tuple[Tensor, int, int]]
"""Vectors, each with a row and the first element of its pieces' place there."""

SHORT: Final = 64 << 10
"""Bytes up to which every rank sums all of a vector itself, which saves a barrier."""

HALF: Final = ROW // 2
"""Bytes of half a row, the length of a piece of a longer vector: pieces stay in the caches."""

SPREAD_FROM: Final = 4 << 10
SLOTS: Final = 32
"""A short vector of at least `SPREAD_FROM` bytes passes through `SLOTS` slots of a row in turn, if they fit:
writing to memory takes longer while other cores have it in their caches."""

_PLACES: Final = 2048
_SHORT_PLANS: Final = 128
_PLANS: Final = 64
"""The most views of rows, and plans for vectors, that are kept."""


class HostCollectives(HostBarrier):
    """One group's part of the arena, as one of its ranks sees it."""

    def __init__(self, group: HostGroup, crowded: bool) -> None:
        super().__init__(group, crowded)
        # A tensor that is made in inference mode can be written in that mode only.
        with torch.inference_mode(False):
            rows = group.block + group.layout.rows
            self._memory = group.arena.tensor(rows, (2, self.size, ROW), torch.uint8)
        self._places: dict[tuple[torch.dtype, int, int, int, int], Tensor] = {}
        self._plans: dict[tuple[torch.dtype, int], _Plan] = {}
        self._short_plans: dict[tuple[torch.dtype, torch.Size, int], _ShortPlan] = {}

    def _memory_of(self, dtype: torch.dtype) -> Tensor:
        """Return all rows, of shape (2, size, elements)."""
        with torch.inference_mode(False):
            return self._memory.view(dtype)

    def _place(self, dtype: torch.dtype, rank: int, length: int, begin: int = 0) -> Tensor:
        """Return a part of a rank's row in the current set."""
        key = dtype, self._set, rank, length, begin
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _PLACES:
                self._places.clear()
            place = self._memory_of(dtype)[self._set, rank, begin : begin + length]
            self._places[key] = place
        return place

    # --- reductions

    def short_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps | None:
        """All-reduce a short tensor, contiguous and of any shape: every rank sums all of it.

        Start at once and continue as long as the others keep up; return the remaining steps, or None.
        """
        key = (tensor.dtype, tensor.shape, reduction.number)
        call, sets = self._short_plans.get(key) or self._plan_short(*key)
        self._set = chosen = self._set ^ 1
        slots = sets[chosen]
        # `_phase` is twice the number of the last phase. Each set is used in every second phase, so that a
        # quarter of it counts the uses of a set, and each use has the slot after the last one.
        rows, place = slots[(self._phase >> 2) % len(slots)]
        move_few(place, tensor.data_ptr(), tensor.nbytes)
        if not self.arrive(call):
            return self._wait_and_fold(call, rows, tensor, reduction)
        self._fold(rows, tensor, reduction)
        return None

    def _wait_and_fold(
        self, call: Call, rows: Sequence[Tensor], tensor: Tensor, reduction: Reduction
    ) -> Steps:
        yield from self.wait(call)
        self._fold(rows, tensor, reduction)

    def _fold(self, rows: Sequence[Tensor], tensor: Tensor, reduction: Reduction) -> None:
        """Reduce rows into `tensor`, which this core has nearer than its copy in the row of this rank."""
        # Only as the first or the second of them may it be the result, too.
        if self.rank == 0:
            rows = (tensor, *rows[1:])
        elif self.rank == 1:
            rows = (rows[0], tensor, *rows[2:])
        reduction.fold(rows, tensor)

    def _plan_short(self, dtype: torch.dtype, shape: torch.Size, number: int) -> _ShortPlan:
        if len(self._short_plans) >= _SHORT_PLANS:
            self._short_plans.clear()
        length = shape.numel()
        nbytes = length * dtype.itemsize
        slots = min(SLOTS, ROW // nbytes) if nbytes >= SPREAD_FROM else 1
        places = [slice(slot * length, (slot + 1) * length) for slot in range(slots)]
        sets = [
            [
                ([row[place].view(shape) for row in rows], rows[self.rank][place].data_ptr())
                for place in places
            ]
            for rows in self._memory_of(dtype)
        ]
        call = Call.of(Collective.ALL_REDUCE, dtype, length, reduction=number), sets
        self._short_plans[dtype, shape, number] = call
        return call

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """Overwrite `tensor`, contiguous, on every rank with the reduction of the ranks' tensors.

        Each rank owns a slice of each piece. There is one barrier (│) for each piece and one more, as the
        next piece is put into other rows meanwhile: into the four halves of the two sets, in turn.

            [1] put 0 │ [3] sum 0, [1] put 1 │ [5] take 0, [3] sum 1, [1] put 2 │ [5] take 1, ...

        Piece n + 4 is put where piece n was. Its put follows barrier n + 3, which no rank enters before it
        has taken piece n, between barriers n + 1 and n + 2: three places would do.
        """
        if self.size == 1:
            reduction.finish(tensor, 1)
            return
        if tensor.nbytes <= SHORT:
            rest = self.short_all_reduce(tensor, reduction)
            if rest is not None:
                yield from rest
            return
        vector = tensor.view(-1)
        call = Call.of(Collective.ALL_REDUCE, vector.dtype, len(vector), reduction=reduction.number)
        sets, address = self._plan(vector.dtype, len(vector)), vector.data_ptr()
        pieces = sets[self._set ^ 1]
        # Two pieces use a set: half of the pieces, rounded up, is how often the set changes; only the parity
        # counts. So `_set` is the one of the last piece, and the next collective uses the other one.
        self._set ^= len(pieces) + 1 >> 1 & 1
        pieces[0].put(address)  # [1]
        yield from self._arrive_and_wait(call)  # [2]
        for number, piece in enumerate(pieces):
            piece.fold(vector, reduction)  # [3]
            if number + 1 < len(pieces):
                pieces[number + 1].put(address)
            yield True
            yield from self._arrive_and_wait(call)  # [4] of this piece, [2] of the next
            piece.take(address)  # [5]
        yield True

    def _plan(self, dtype: torch.dtype, length: int) -> _Plan:
        """Return the half rows that the pieces of a vector pass through, by the set of the first piece."""
        plan = self._plans.get((dtype, length))
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            most = HALF // dtype.itemsize
            halves = self._memory_of(dtype).view(2, self.size, 2, most).transpose(1, 2)
            plan = [
                [
                    Piece(
                        self.rank,
                        # Pieces 0, 1, 2, 3 in halves 0 and 1 of the first set, then of the other one.
                        list(halves[first ^ number >> 1 & 1, number & 1]),
                        begin,
                        min(most, length - begin),
                    )
                    for number, begin in enumerate(range(0, length, most))
                ]
                for first in range(2)
            ]
            self._plans[dtype, length] = plan
        return plan

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction) -> Steps:
        """Overwrite `output` with the reduction of the ranks' vectors for this rank."""
        if self.size == 1:
            output.copy_(inputs[0])
            reduction.finish(output, 1)
            return
        dtype, rank = output.dtype, self.rank
        call = Call.of(Collective.REDUCE_SCATTER, dtype, sum(map(len, inputs)), reduction=reduction.number)
        most = ROW // dtype.itemsize // self.size
        for begin in range(0, max(*map(len, inputs), 1), most):
            self._set ^= 1
            for other in self._others:
                piece = _part(inputs[other], begin, most)
                self._place(dtype, rank, len(piece), other * most).copy_(piece)
            yield from self._arrive_and_wait(call)
            target, mine = _part(output, begin, most), _part(inputs[rank], begin, most)
            if len(target):
                found = [self._place(dtype, other, len(target), rank * most) for other in range(self.size)]
                found[rank] = mine
                # As in `Piece.fold`; no other rank reads this part of row 0.
                result = target if rank < 2 else found[0]
                reduction.fold(found, result)
                if result is not target:
                    target.copy_(result)
            yield True

    # --- moves

    def _pass_on(
        self,
        call: Call,
        longest: int,
        most: int,
        puts: _Moves,
        takes: _Moves,
        own: tuple[Tensor, Tensor] | None = None,
    ) -> Steps:
        """Pass vectors through the rows, in pieces of at most `most` elements.

        `puts` and `takes` are this rank's vectors with the row, and the place in it, of their pieces; `own`
        is the (target, source) of what stays in this rank; `longest` is the longest vector of any rank.
        """
        if own is not None:
            own[0].copy_(own[1])
        if self.size == 1:
            return
        for begin in range(0, max(longest, 1), most):
            self._set ^= 1
            for vector, row, at in puts:
                piece = _part(vector, begin, most)
                self._place(piece.dtype, row, len(piece), at).copy_(piece)  # [1]
            yield from self._arrive_and_wait(call)  # [2]
            for vector, row, at in takes:
                piece = _part(vector, begin, most)
                piece.copy_(self._place(piece.dtype, row, len(piece), at))  # [5]
            yield True

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Overwrite `tensor`, contiguous, on every rank with rank `root`'s."""
        vector = tensor.view(-1)
        call = Call.of(Collective.BROADCAST, vector.dtype, len(vector), root=root)
        moves = [(vector, root, 0)]
        puts, takes = (moves, []) if self.rank == root else ([], moves)
        return self._pass_on(call, len(vector), ROW // vector.itemsize, puts, takes)

    def all_gather(self, tensor: Tensor, outputs: Sequence[Tensor]) -> Steps:
        """Overwrite the vectors `outputs` with the ranks' tensors, contiguous, which may differ in length."""
        vector, mine = tensor.view(-1), outputs[self.rank]
        call = Call.of(Collective.ALL_GATHER, vector.dtype, sum(map(len, outputs)))
        own = None if mine.data_ptr() == vector.data_ptr() else (mine, vector)
        puts, takes = [(vector, self.rank, 0)], [(outputs[other], other, 0) for other in self._others]
        return self._pass_on(call, max(map(len, outputs)), ROW // vector.itemsize, puts, takes, own)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite the vectors `outputs` of rank `root` with the ranks' contiguous tensors of one shape."""
        vector = tensor.view(-1)
        call = Call.of(Collective.GATHER, vector.dtype, len(vector), root=root)
        most = ROW // vector.itemsize
        if self.rank != root:
            return self._pass_on(call, len(vector), most, [(vector, self.rank, 0)], [])
        takes = [(outputs[other], other, 0) for other in self._others]
        return self._pass_on(call, len(vector), most, [], takes, (outputs[root], vector))

    def scatter(self, vector: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite `vector` with rank `root`'s input for this rank; all inputs have the same length."""
        call = Call.of(Collective.SCATTER, vector.dtype, len(vector), root=root)
        most = ROW // vector.itemsize
        if self.rank != root:
            return self._pass_on(call, len(vector), most, [], [(vector, self.rank, 0)])
        puts = [(inputs[other], other, 0) for other in self._others]
        return self._pass_on(call, len(vector), most, puts, [], (vector, inputs[root]))

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Steps:
        """Overwrite `outputs` with each rank's input for this one; the ranks agree on the lengths first."""
        call = Call.of(Collective.ALL_TO_ALL, inputs[0].dtype)
        table = yield from self.all_gather_ints([*map(len, inputs), *map(len, outputs)], call)
        agree_on_lengths(table, self._group.global_ranks)
        rank, most = self.rank, ROW // inputs[0].itemsize // self.size
        puts = [(inputs[other], rank, other * most) for other in self._others]
        takes = [(outputs[other], other, rank * most) for other in self._others]
        yield from self._pass_on(call, max(map(max, table)), most, puts, takes, (outputs[rank], inputs[rank]))

    def all_gather_ints(self, numbers: Sequence[int], call: Call) -> Generator[bool, None, list[list[int]]]:
        """Gather some whole numbers from each rank, as part of `call`."""
        self._set ^= 1
        rows = [self._place(torch.int64, rank, len(numbers)) for rank in range(self.size)]
        rows[self.rank].copy_(torch.tensor(numbers, device="cpu"))
        yield from self._arrive_and_wait(call)
        return [row.tolist() for row in rows]


def _part(vector: Tensor, begin: int, most: int) -> Tensor:
    """Return at most `most` elements of a vector, from `begin` on."""
    return vector if not begin and len(vector) <= most else vector[begin : begin + most]
