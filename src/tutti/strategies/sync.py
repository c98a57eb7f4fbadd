"""Synchronous data parallelism: all workers step together, as one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.optim.sharded import Piece, ShardedOptimizer, own_slices
from tutti.replica import Replica
from tutti.strategies.base import Clip, Home, Strategy, Worker


@dataclass(frozen=True)
class Sync(Strategy):
    """Synchronous data-parallel training: the same weights as sequential training, at any number of workers.

        g = sum over the workers and passes of  g_worker        (each weighted by its share of the samples)
        w = optimizer(w, clip(g))

    Inside a host no gradient is copied: each rank sums its own slice over the gradients of all, and runs the
    optimizer on that slice of the one vector of weights. Across hosts, the owners of a slice add up what their
    hosts have. No rank holds more than its slice of the optimizer's state.

        rank 0  backward │ sum 0  (across)  optimizer 0  zero 0 │ next forward
        rank 1  backward │ sum 1  (across)  optimizer 1  zero 1 │ next forward
        rank 2  backward │ sum 2  (across)  optimizer 2  zero 2 │ next forward
                         A                                      B

    Barrier A: every gradient of the host is complete. Barrier B: every slice of the weights is new, and every
    slice of the gradients zero. Clipping by norm needs one more barrier before the optimizer, which waits for
    all slices' sums of squares. `sum`, `optimizer` and `zero` run over one piece of the slice after the other
    where nothing comes between, so that a gradient is fetched from memory once.

    Sources: Chen et al. 2016, "Revisiting Distributed Synchronous SGD" (the equation). Rajbhandari et al.
    2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1 (the optimizer's
    state in slices). Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"
    (all-reduce in two levels).

    Args:
        every: forward and backward passes of each worker for one update (gradient accumulation); the batch is
            split over them.
    """

    name: ClassVar[str] = "sync"
    home: ClassVar[Home] = Home.SHARED

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadOption(f"option 'every' of strategy 'sync' is {self.every}; the smallest possible is 1")

    @property
    @override
    def passes(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _SyncWorker(replica, comm, optimizer, clip)


class _Part:
    """A piece of this rank's slice: the host's gradients for it, and the optimizer that moves it."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        # Rows are added in the order of ranks, so that the sum is the same in every run.
        self.total, *self._others = (row[piece.place] for row in piece.flat.rows)

    def sum(self) -> None:
        """Add up the host's rows in the first one; leave the others at zero for the next backward pass."""
        for other in self._others:
            self.total.add_(other)
            other.zero_()

    def move(self) -> None:
        """Move the weights by the sum, and leave that at zero too."""
        self._piece.step()
        self.total.zero_()


class _SyncWorker(Worker):
    def __init__(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> None:
        self._node, self._clip = comm.node, clip
        # The k-th ranks of all hosts own the k-th slice together; a rank that some host lacks owns none.
        lanes = min(cast(list[int], comm.all_gather_objects(comm.node.size)))
        self._lane = comm.node.rank if comm.node.rank < lanes else None
        cross = comm.cross
        self._cross = cross if cross is not None and cross.size > 1 else None
        slices = [
            slice(0, 0) if self._lane is None else own_slices(flat, lanes, optimizer)[self._lane]
            for flat in replica.flats
        ]
        totals = [flat.rows[0] for flat in replica.flats]
        self._optimizer = ShardedOptimizer(optimizer, replica, slices, totals)
        self._parts = [_Part(piece) for piece in self._optimizer.pieces]
        self._totals = [total[own] for total, own in zip(totals, slices, strict=True) if own.start < own.stop]
        self._squares = comm.node.shared(lanes, dtype=torch.float64) if clip.norm is not None else None

    @override
    def step(self) -> None:
        self._node.barrier()
        self._optimizer.begin()
        if self._cross is None and self._squares is None:
            self._sum_and_move()
        else:
            self._sum_then_move()
        self._node.barrier()

    @override
    def finish(self) -> None:
        """Every step leaves the final weights in every replica."""

    def _sum_and_move(self) -> None:
        """One piece after the other, each while its gradients are in the cache."""
        for part in self._parts:
            part.sum()
            if self._clip.value is not None:
                clip_values([part.total], self._clip.value)
            part.move()

    def _sum_then_move(self) -> None:
        """The whole gradient first, as a sum over hosts or its norm is needed."""
        for part in self._parts:
            part.sum()
        if self._cross is not None:
            for total in self._totals:
                self._cross.all_reduce(total)
        if self._clip.value is not None:
            clip_values(self._totals, self._clip.value)
        scale = 1.0
        if self._squares is not None and self._clip.norm is not None:
            scale = scale_for(self._norm(self._squares), self._clip.norm)
        for part in self._parts:
            if scale != 1:
                part.total.mul_(scale)
            part.move()

    def _norm(self, squares: Tensor) -> float:
        """The 2-norm of the whole gradient, bit-equal on all ranks: all slices' squares in the same order."""
        if self._lane is not None:
            squares[self._lane] = squared_norm(part.total for part in self._parts)
        # The next write is after the barrier at the end of this step, when all have read.
        self._node.barrier()
        return math.sqrt(sum(squares.tolist()))
