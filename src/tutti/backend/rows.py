"""The collectives of the ranks of one host, over the arena and nothing else.

Vectors pass through two sets of rows, one row per rank, used in turn:

    rank 0   put slice 1 into row 0 of set A ┐         ┌ sum slice 0 ┐         ┌ take slice 1
    rank 1   put slice 0 into row 1 of set A ┴ barrier ┴ sum slice 1 ┴ barrier ┴ take slice 0    set B is next

A rank that is back in set A has passed a barrier in set B, which nobody enters before they are done with set
A: no further barrier is needed. Sums are formed in rank order, each element by one rank alone or by all in
the same way, so that they are bit-equal everywhere.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import torch
from torch import Tensor

from tutti.backend.calls import Call, Kind, agree_on_lengths, check_sum
from tutti.backend.operations import Reduction
from tutti.backend.roll_call import RollCall, Steps
from tutti.comm.arena import Arena
from tutti.comm.base import cut
from tutti.comm.control import CALLS
from tutti.comm.fence import ORDERED, fence
from tutti.comm.rings import as_bytes

_Hop = tuple[Call, list[list[list[Tensor]]]]
_Plan = tuple[list[list["_Piece"]], list[int]]

ONE_HOP: Final = 64 << 10
"""Bytes up to which every rank sums all of a vector itself, which saves a barrier."""

ROW: Final = 1 << 20
"""Bytes of a row: longer vectors travel in pieces."""

HALF: Final = ROW // 2
"""Bytes of half a row, the length of a piece of a longer vector: pieces stay in the caches."""

_TRIES: Final = 4000
"""How often a short call asks for the others before it is left to whoever waits."""

SPREAD_FROM: Final = 4 << 10
SLOTS: Final = 32
"""A short vector of at least so many bytes passes through so many slots of a row, if they fit, in turn: to
write to memory that other cores have in their caches takes longer than to memory that has left them."""

_VIEWS: Final = 512
_HOPS: Final = 128
_PLANS: Final = 64
"""How many of the views of rows, and of the plans for vectors, are kept."""


class Rows(RollCall):
    """One group's part of the arena, as one of its ranks sees it.

    Args:
        arena: the memory that the ranks share.
        memory: where in it the rows begin, of `rows_bytes(size)`.
        words: the control words.
        rank: this process's number in the group.
        names: what the group's ranks are called in errors: their numbers in the job.
        crowded: whether the ranks outnumber the cores: then nobody waits without letting go of its core.
    """

    def __init__(
        self,
        arena: Arena,
        memory: int,
        words: memoryview,
        rank: int,
        names: Sequence[int],
        crowded: bool,
    ) -> None:
        super().__init__(words, rank, names)
        # What is made in inference mode can be written in that mode alone.
        with torch.inference_mode(False):
            self._memory = arena.tensor(memory, (2, self.size, ROW), torch.uint8)
        self._typed: dict[torch.dtype, list[list[Tensor]]] = {}
        self._short: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self._plans: dict[tuple[torch.dtype, int], _Plan] = {}
        self._hops: dict[tuple[torch.dtype, torch.Size, int], _Hop] = {}
        self._tries = 0 if crowded else _TRIES

    def _memory_of(self, dtype: torch.dtype) -> Tensor:
        """All rows, of shape (2, size, elements)."""
        with torch.inference_mode(False):
            return self._memory.view(dtype)

    def _rows(self, dtype: torch.dtype) -> list[Tensor]:
        """The rows that may be written now: one of ROW bytes for each rank."""
        self._set ^= 1
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = [list(rows) for rows in self._memory_of(dtype)]
        return typed[self._set]

    def _short_rows(self, dtype: torch.dtype, length: int) -> list[Tensor]:
        """The beginnings of the rows that may be written now."""
        self._set ^= 1
        found = self._short.get((dtype, length))
        if found is None:
            if len(self._short) >= _VIEWS:
                self._short.clear()
            found = [[row[:length] for row in rows] for rows in self._memory_of(dtype)]
            self._short[dtype, length] = found
        return found[self._set]

    # --- reductions

    def hop(self, tensor: Tensor, way: Reduction) -> Steps | None:
        """All-reduce a short tensor, contiguous and of any shape: every rank sums all of it itself.

        Begins at once and goes on as long as the others are at it, too.

        Returns:
            What is left to be done, or None.
        """
        key = (tensor.dtype, tensor.shape, way.number)
        call, sets = self._hops.get(key) or self._plan_hop(*key)
        self._set = chosen = self._set ^ 1
        self._epoch = epoch = self._epoch + 1
        slots, words = sets[chosen], self._words
        rows = slots[(epoch >> 1) % len(slots)]
        rows[self.rank].copy_(tensor)
        words[self._own + CALLS + (epoch & 1)] = call
        if not ORDERED:
            fence()
        words[self._own] = epoch
        tries = self._tries
        for _, line in self._others:
            while words[line] < epoch:
                tries -= 1
                if tries < 0:
                    return self._land(call, rows, tensor, way)
        self._agree(call)
        way.fold(rows, tensor)
        return None

    def _land(self, call: Call, rows: Sequence[Tensor], tensor: Tensor, way: Reduction) -> Steps:
        yield from self._arrive()
        self._agree(call)
        way.fold(rows, tensor)

    def _plan_hop(self, dtype: torch.dtype, shape: torch.Size, number: int) -> _Hop:
        if len(self._hops) >= _HOPS:
            self._hops.clear()
        length = shape.numel()
        nbytes = length * dtype.itemsize
        slots = min(SLOTS, ROW // nbytes) if nbytes >= SPREAD_FROM else 1
        places = [slice(slot * length, (slot + 1) * length) for slot in range(slots)]
        sets = [
            [[row[place].view(shape) for row in rows] for place in places] for rows in self._memory_of(dtype)
        ]
        found = Call.of(Kind.ALL_REDUCE, dtype, length, reduction=number), sets
        self._hops[dtype, shape, number] = found
        return found

    def all_reduce(self, vector: Tensor, way: Reduction) -> Steps:
        """Overwrite `vector` on every rank with what the ranks' vectors make together.

        Each rank owns a slice of each piece. There is one barrier for each piece, as the next one is put into
        other rows meanwhile: there are four half sets, in turn.

            put 0 │ fold 0, put 1 │ take 0, fold 1, put 2 │ take 1, ...
        """
        if self.size == 1:
            way.finish(vector, 1)
            return
        if vector.nbytes <= ONE_HOP:
            rest = self.hop(vector, way)
            if rest is not None:
                yield from rest
            return
        call = Call.of(Kind.ALL_REDUCE, vector.dtype, vector.numel(), reduction=way.number)
        sets, lengths = self._plan(vector.dtype, len(vector))
        pieces, parts, size = sets[self._set ^ 1], torch.split(vector, lengths), self.size
        self._set ^= len(pieces) + 1 >> 1 & 1
        pieces[0].put(parts[:size])
        yield from self._meet(call)
        for number, piece in enumerate(pieces):
            own = parts[number * size : (number + 1) * size]
            piece.fold(own, way)
            if number + 1 < len(pieces):
                pieces[number + 1].put(parts[(number + 1) * size : (number + 2) * size])
            yield True
            yield from self._meet(call)
            piece.take(own)
        yield True

    def _plan(self, dtype: torch.dtype, length: int) -> _Plan:
        """The half rows that the pieces of a vector pass through."""
        found = self._plans.get((dtype, length))
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            most = HALF // dtype.itemsize
            pieces = [min(most, length - begin) for begin in range(0, length, most)]
            slices = [cut(piece, self.size) for piece in pieces]
            memory = self._memory_of(dtype).view(2, self.size, 2, -1)
            sets = [
                [
                    _Piece(self.rank, [row[number & 1] for row in memory[first ^ number >> 1 & 1]], places)
                    for number, places in enumerate(slices)
                ]
                for first in range(2)
            ]
            found = sets, [place.stop - place.start for places in slices for place in places]
            self._plans[dtype, length] = found
        return found

    def reduce(self, vector: Tensor, way: Reduction, root: int) -> Steps:
        """Overwrite `vector` on rank `root` with what the ranks' vectors make together."""
        if self.size == 1:
            way.finish(vector, 1)
            return
        call = Call.of(Kind.REDUCE, vector.dtype, vector.numel(), reduction=way.number, root=root)
        for piece in torch.split(vector, ROW // vector.itemsize):
            rows = self._rows(vector.dtype)
            rows[self.rank][: len(piece)].copy_(piece)
            yield from self._meet(call)
            if self.rank == root:
                way.fold([row[: len(piece)] for row in rows], piece)
            yield True

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, way: Reduction) -> Steps:
        """Overwrite `output` with what the ranks' vectors for this rank make together.

        Args:
            inputs: one vector for each rank.
            output: this rank's.
            way: what is made of them.
        """
        if self.size == 1:
            output.copy_(inputs[0])
            way.finish(output, 1)
            return
        lengths, dtype = [len(vector) for vector in inputs], output.dtype
        call = Call.of(
            Kind.REDUCE_SCATTER, dtype, sum(lengths), reduction=way.number, root=check_sum(lengths)
        )
        most, rank = ROW // dtype.itemsize // self.size, self.rank
        for begin in range(0, max(*lengths, 1), most):
            rows = self._rows(dtype)
            for other, _ in self._others:
                piece = inputs[other][begin : begin + most]
                rows[rank][other * most : other * most + len(piece)].copy_(piece)
            yield from self._meet(call)
            target, mine = output[begin : begin + most], inputs[rank][begin : begin + most]
            if len(target):
                place = slice(rank * most, rank * most + len(target))
                found = [mine if other == rank else row[place] for other, row in enumerate(rows)]
                result = found[_home(rank)]
                way.fold(found, result)
                target.copy_(result)
            yield True

    # --- moves

    def broadcast(self, vector: Tensor, root: int) -> Steps:
        """Overwrite `vector` on every rank with that of rank `root`."""
        call = Call.of(Kind.BROADCAST, vector.dtype, vector.numel(), root=root)
        vector = as_bytes(vector)
        for piece in torch.split(vector, ROW):
            row = self._rows(torch.uint8)[root]
            if self.rank == root:
                row[: len(piece)].copy_(piece)
            yield from self._meet(call)
            if self.rank != root:
                piece.copy_(row[: len(piece)])
            yield True

    def all_gather(self, vector: Tensor, outputs: Sequence[Tensor]) -> Steps:
        """Overwrite `outputs` with the ranks' vectors, which may differ in length."""
        lengths = [len(output) for output in outputs]
        call = Call.of(Kind.ALL_GATHER, vector.dtype, sum(lengths), root=check_sum(lengths))
        if outputs[self.rank].data_ptr() != vector.data_ptr():
            outputs[self.rank].copy_(vector)
        vector = as_bytes(vector)
        places = [as_bytes(output) for output in outputs]
        for begin in range(0, max(*map(len, places), 1), ROW):
            rows = self._rows(torch.uint8)
            mine = vector[begin : begin + ROW]
            rows[self.rank][: len(mine)].copy_(mine)
            yield from self._meet(call)
            for other, _ in self._others:
                piece = places[other][begin : begin + ROW]
                piece.copy_(rows[other][: len(piece)])
            yield True

    def gather(self, vector: Tensor, outputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite `outputs` on rank `root` with the ranks' vectors, which are of one length."""
        call = Call.of(Kind.GATHER, vector.dtype, vector.numel(), root=root)
        if self.rank == root:
            outputs[root].copy_(vector)
        vector = as_bytes(vector)
        places = [as_bytes(output) for output in outputs]
        for begin in range(0, max(len(vector), 1), ROW):
            rows = self._rows(torch.uint8)
            mine = vector[begin : begin + ROW]
            if self.rank != root:
                rows[self.rank][: len(mine)].copy_(mine)
            yield from self._meet(call)
            if self.rank == root:
                for other, _ in self._others:
                    places[other][begin : begin + ROW].copy_(rows[other][: len(mine)])
            yield True

    def scatter(self, vector: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite `vector` with what rank `root` has for this rank in `inputs`, all of one length."""
        call = Call.of(Kind.SCATTER, vector.dtype, vector.numel(), root=root)
        if self.rank == root:
            vector.copy_(inputs[root])
        vector = as_bytes(vector)
        places = [as_bytes(each) for each in inputs]
        for begin in range(0, max(len(vector), 1), ROW):
            rows = self._rows(torch.uint8)
            mine = vector[begin : begin + ROW]
            if self.rank == root:
                for other, _ in self._others:
                    rows[other][: len(mine)].copy_(places[other][begin : begin + ROW])
            yield from self._meet(call)
            if self.rank != root:
                mine.copy_(rows[self.rank][: len(mine)])
            yield True

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Steps:
        """Overwrite `outputs` with what each rank has for this one; lengths are as the ranks agree."""
        call = Call.of(Kind.ALL_TO_ALL, inputs[0].dtype)
        sources = [as_bytes(vector) for vector in inputs]
        places = [as_bytes(vector) for vector in outputs]
        table = yield from self._exchange_lengths([*map(len, inputs), *map(len, outputs)], call)
        agree_on_lengths(table, self._names)
        most, rank = ROW // self.size, self.rank
        places[rank].copy_(sources[rank])
        for begin in range(0, max(map(max, table)) * inputs[0].itemsize, most):
            rows = self._rows(torch.uint8)
            for other, _ in self._others:
                piece = sources[other][begin : begin + most]
                rows[rank][other * most : other * most + len(piece)].copy_(piece)
            yield from self._meet(call)
            for other, _ in self._others:
                piece = places[other][begin : begin + most]
                piece.copy_(rows[other][rank * most : rank * most + len(piece)])
            yield True

    def _exchange_lengths(self, lengths: Sequence[int], call: Call) -> Generator[bool, None, list[list[int]]]:
        rows = self._short_rows(torch.int64, len(lengths))
        rows[self.rank].copy_(torch.tensor(lengths))
        yield from self._meet(call)
        return [row.tolist() for row in rows]


def rows_bytes(size: int) -> int:
    """How many bytes of the arena the rows of a group of `size` ranks need."""
    return 2 * size * ROW


class _Piece:
    """Where the slices of a piece of a vector are in the rows.

    Args:
        rank: this process's number in the group.
        rows: of all ranks.
        places: the slices that the ranks own.
    """

    def __init__(self, rank: int, rows: Sequence[Tensor], places: Sequence[slice]) -> None:
        self._rank = rank
        self._given = [(owner, rows[rank][place]) for owner, place in enumerate(places) if owner != rank]
        self._found = [row[places[rank]] for row in rows]
        self._made = [
            (owner, rows[_home(owner)][place]) for owner, place in enumerate(places) if owner != rank
        ]

    def put(self, parts: Sequence[Tensor]) -> None:
        """Give the others what they own."""
        for owner, place in self._given:
            place.copy_(parts[owner])

    def fold(self, parts: Sequence[Tensor], way: Reduction) -> None:
        """Make the slice that this rank owns, here and for the others."""
        rank = self._rank
        found = [*self._found]
        found[rank] = parts[rank]
        result = found[_home(rank)]
        way.fold(found, result)
        parts[rank].copy_(result)

    def take(self, parts: Sequence[Tensor]) -> None:
        """Take what the others have made."""
        for owner, place in self._made:
            parts[owner].copy_(place)


def _home(owner: int) -> int:
    """The row in which the owner of a slice leaves the result: one that it has read already."""
    return 0 if owner else 1
