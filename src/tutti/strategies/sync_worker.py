"""What a worker of `sync` does at each step, for gradients summed in shared memory or reduced as a whole."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.optim.missing import Missing
from tutti.optim.sharded import Piece, ShardedOptimizer, own_slices
from tutti.reduction import Layout, Reduction
from tutti.replica import Replica
from tutti.rules.averaging import add_up
from tutti.strategies.base import Clip, Division, Worker
from tutti.strategies.joint_gradients import MakeReduction
from tutti.strategies.missing import JointlyMissing


class _Part:
    """A piece of this rank's slice: the host's gradients for it, and the optimizer that moves it."""

    def __init__(self, piece: Piece, rows: Sequence[Tensor]) -> None:
        self._piece = piece
        # Rows are added in the order of ranks, so that the sum is the same in every run.
        self.total, *self._others = (row[piece.place] for row in rows)

    def sum(self) -> None:
        """Add up the host's rows in the first one; leave the others at zero for the next backward pass."""
        add_up(self.total, self._others)

    def move(self, missing: Missing) -> None:
        """Move the weights by the sum, and leave that at zero too."""
        self._piece.step(missing)
        self.total.zero_()


class SyncWorker(Worker):
    """Moves this rank's slice of the host's weights.

    Args:
        rows: for each of the replica's vectors, the gradients to be added up on this host; the sum is formed
            in the first one.
        whole: no parameter is cut by the slices.
    """

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        optimizer: Optimizer,
        clip: Clip,
        rows: Sequence[Sequence[Tensor]],
        whole: bool,
    ) -> None:
        super().__init__()
        self._node, self._clip, self._clock = comm.node, clip, comm.clock
        self.share = 1 / comm.size
        # The k-th ranks of all hosts own the k-th slice together; a rank that some host lacks owns none.
        lanes = min(cast(list[int], comm.all_gather_objects(comm.node.size)))
        self._lane = comm.node.rank if comm.node.rank < lanes else None
        self._slices = [
            slice(0, 0) if self._lane is None else own_slices(flat, lanes, optimizer, whole)[self._lane]
            for flat in replica.flats
        ]
        totals = [first for first, *_ in rows]
        self._optimizer = ShardedOptimizer(optimizer, replica, self._slices, totals)
        self._missing = JointlyMissing(replica, comm, totals, self._slices)
        of_flat = {id(flat): vectors for flat, vectors in zip(replica.flats, rows, strict=True)}
        self._parts = [_Part(piece, of_flat[id(piece.flat)]) for piece in self._optimizer.pieces]
        self._totals = [
            total[own] for total, own in zip(totals, self._slices, strict=True) if own.start < own.stop
        ]
        self._squares = comm.node.shared(lanes, dtype=torch.float64) if clip.norm is not None else None
        self._counted = [part.total for part in self._parts]
        if clip.divided is not None:
            self._counted = list(_counted(replica, totals, self._slices, clip.divided))

    @override
    def step(self) -> None:
        began = self._clock()
        self._missing.note()
        self._meet()
        met = self._clock()
        self._optimizer.begin()
        sent = self._sum_and_move()
        moved = self._clock()
        self._node.barrier()
        self.traffic.add(sent, met - began + self._clock() - moved, staleness=0)

    @override
    def finish(self) -> None:
        """Every step leaves the final weights in every replica."""

    @abstractmethod
    def _meet(self) -> None:
        """Wait until the gradients are complete."""

    @abstractmethod
    def _sum_and_move(self) -> int:
        """Sum the gradients and move this rank's slices of the weights; returns the bytes sent for that."""

    def _clip_and_move(self) -> None:
        """Move the weights by the sums, which are complete."""
        missing = self._missing.find()
        if self._clip.value is not None:
            clip_values(self._totals, self._clip.value)
        scale = 1.0
        if self._squares is not None and self._clip.norm is not None:
            scale = scale_for(self._norm(self._squares), self._clip.norm)
        with self.updating:
            for part in self._parts:
                if scale != 1:
                    part.total.mul_(scale)
                if not self._optimizer.joint:
                    part.move(missing)
            if self._optimizer.joint:
                self._optimizer.step_itself(missing)
                for part in self._parts:
                    part.total.zero_()

    def _norm(self, squares: Tensor) -> float:
        """The 2-norm of the whole gradient, bit-equal on all ranks: all slices' squares in the same order."""
        if self._lane is not None:
            squares[self._lane] = squared_norm(self._counted)
        # The next write is after the barrier at the end of this step, when all have read.
        self._node.barrier()
        total, divided = sum(squares.tolist()), self._clip.divided
        return math.sqrt(total if divided is None else divided.add_up(total))


def _counted(
    replica: Replica, totals: Sequence[Tensor], slices: Sequence[slice], divided: Division
) -> Iterator[Tensor]:
    """What of this rank's slices counts in the norm of a model that is divided over a team."""
    for flat, total, own in zip(replica.flats, totals, slices, strict=True):
        for parameter, span in zip(flat.parameters, flat.spans, strict=True):
            start, stop = max(span.start, own.start), min(span.stop, own.stop)
            if start < stop and divided.counts(parameter):
                yield total[start:stop]


def _reduce(reductions: Sequence[Reduction], vectors: Sequence[Tensor], share: float) -> int:
    """Reduce one vector after the other; returns the bytes sent."""
    return sum(one.all_reduce(vector, share) for one, vector in zip(reductions, vectors, strict=True))


class SharedWorker(SyncWorker):
    """Sums its slice over the host's gradients where they lie, and then between the hosts."""

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        optimizer: Optimizer,
        clip: Clip,
        between: MakeReduction,
        whole: bool,
    ) -> None:
        super().__init__(replica, comm, optimizer, clip, [list(flat.rows) for flat in replica.flats], whole)
        owned = [
            (flat, own) for flat, own in zip(replica.flats, self._slices, strict=True) if own.start < own.stop
        ]
        cross = comm.cross
        self._between = (
            [between(cross, Layout.of(flat, own)) for flat, own in owned]
            if cross is not None and cross.size > 1
            else []
        )
        # Gradients that others read, and the slice of the weights that it writes for them.
        self._inside = sum(flat.grads.nbytes for flat in replica.flats) if comm.node.size > 1 else 0

    @override
    def adopt(self) -> None:
        for reduction in self._between:
            reduction.forget()

    @override
    def _meet(self) -> None:
        self._node.barrier()

    @override
    def _sum_and_move(self) -> int:
        if not self._between and self._squares is None and not self._optimizer.joint:
            missing = self._missing.find()
            # One piece after the other, each while its gradients are in the cache.
            for part in self._parts:
                part.sum()
                with self.updating:
                    if self._clip.value is not None:
                        clip_values([part.total], self._clip.value)
                    part.move(missing)
            return self._inside
        for part in self._parts:
            part.sum()
        sent = self._inside
        if self._between:
            began = self._clock()
            sent += _reduce(self._between, self._totals, self.share)
            self.traffic.wait_s += self._clock() - began
        self._clip_and_move()
        return sent


class WholeWorker(SyncWorker):
    """Reduces its whole gradient with those of all ranks, and moves its slice by the result."""

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        optimizer: Optimizer,
        clip: Clip,
        make: MakeReduction,
    ) -> None:
        super().__init__(replica, comm, optimizer, clip, [[flat.grads] for flat in replica.flats], False)
        self._grads = [flat.grads for flat in replica.flats]
        self._reductions = [make(comm, Layout.of(flat, slice(0, len(flat.grads)))) for flat in replica.flats]

    @override
    def adopt(self) -> None:
        for reduction in self._reductions:
            reduction.forget()

    @override
    def _meet(self) -> None:
        # No rank has the result before all have given their gradients: this is a barrier too.
        self._sent = _reduce(self._reductions, self._grads, self.share)

    @override
    def _sum_and_move(self) -> int:
        self._clip_and_move()
        for grads in self._grads:
            grads.zero_()
        return self._sent
