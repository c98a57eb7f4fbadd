"""Synchronous data parallelism: all workers step together, as one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.algorithms import ALGORITHMS
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.optim.sharded import Piece, ShardedOptimizer, own_slices
from tutti.reduction import Adaptive, ByMessages, Compressed, Layout, LowRank, Native, Reduction
from tutti.replica import Replica
from tutti.rules.averaging import add_up
from tutti.rules.compression import Cast, Codec, Int8, Sign, TopK
from tutti.strategies.base import Clip, Home, Strategy, Worker

MakeReduction = Callable[[Communicator, Layout], Reduction]


@dataclass(frozen=True)
class Sync(Strategy):
    """Synchronous data-parallel training: the same weights as sequential training, at any number of workers.

        g = sum over the workers and passes of  g_worker        (each weighted by its share of the samples)
        w = optimizer(w, clip(g))

    Inside a host no gradient is copied: each rank sums its own slice over the gradients of all, and runs the
    optimizer on that slice of the one vector of weights. Across hosts, the owners of a slice add up what
    their hosts have. No rank holds more than its slice of the optimizer's state.

        rank 0  backward │ sum 0  (across)  optimizer 0  zero 0 │ next forward
        rank 1  backward │ sum 1  (across)  optimizer 1  zero 1 │ next forward
        rank 2  backward │ sum 2  (across)  optimizer 2  zero 2 │ next forward
                         A                                      B

    Barrier A: every gradient of the host is complete. Barrier B: every slice of the weights is new, and every
    slice of the gradients zero. Clipping by norm needs one more barrier before the optimizer, which waits for
    all slices' sums of squares. `sum`, `optimizer` and `zero` run over one piece of the slice after the other
    where nothing comes between, so that a gradient is fetched from memory once.

    The options replace the sum. `compress` acts on what goes across, between the owners of a slice. Any other
    `collective`, `reduce="adasum"` and `compress_inside` act on whole gradients of all workers instead:

        rank 0  backward │ g = reduce(g 0, g 1, g 2)  optimizer 0  zero │ next forward
        rank 1  backward │ g = reduce(g 0, g 1, g 2)  optimizer 1  zero │ next forward
        rank 2  backward │ g = reduce(g 0, g 1, g 2)  optimizer 2  zero │ next forward

    Sources: Chen et al. 2016, "Revisiting Distributed Synchronous SGD" (the equation). Rajbhandari et al.
    2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1 (the optimizer's
    state in slices). Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"
    (all-reduce in two levels). Of the options: `tutti.algorithms`, `tutti.rules.adasum`,
    `tutti.rules.compression` (Karimireddy et al. 2019: error feedback) and `tutti.rules.low_rank` (Vogels et
    al. 2019: PowerSGD).

    Args:
        every: forward and backward passes of each worker for one update (gradient accumulation); the batch is
            split over them.
        collective: how the sum is formed. native: as drawn; mpi: the communicator's own all-reduce of whole
            gradients, which is MPI's between hosts; ring, halving_doubling, tree, hierarchical, torus: by
            messages between two ranks.
        reduce: mean: over the samples. adasum: pairwise adaptive sums of the workers' gradients.
        compress: what gradients become on their way: none, bf16, fp16, int8, top_k, sign or power_sgd. What is
            lost is added to the next gradient.
        keep: the share of a gradient's elements that `top_k` sends.
        rank: of the factors that `power_sgd` sends.
        compress_inside: compress every worker's gradient, not just the sums that hosts send each other.

    Raises:
        BadOption: a value is out of range, or two options do not go together.
    """

    name: ClassVar[str] = "sync"
    home: ClassVar[Home] = Home.SHARED

    every: int = field(default=1, metadata={"help": "passes of each worker for one update, from 1"})
    collective: str = field(
        default="native",
        metadata={"help": "native, mpi, ring, halving_doubling, tree, hierarchical or torus"},
    )
    reduce: str = field(default="mean", metadata={"help": "mean or adasum"})
    compress: str = field(
        default="none",
        metadata={"help": "none, bf16, fp16, int8, top_k, sign or power_sgd; between hosts only"},
    )
    keep: float = field(default=0.01, metadata={"help": "share of the elements that top_k sends, to 1"})
    rank: int = field(default=2, metadata={"help": "rank of the factors that power_sgd sends, from 1"})
    compress_inside: bool = field(default=False, metadata={"help": "compress inside a host too"})

    def __post_init__(self) -> None:
        _require_whole("every", self.every)
        _require_whole("rank", self.rank)
        _require_one_of("collective", self.collective, COLLECTIVES)
        _require_one_of("reduce", self.reduce, REDUCTIONS)
        _require_one_of("compress", self.compress, ("none", *COMPRESSIONS))
        _require_one_of("compress_inside", self.compress_inside, (False, True))
        if isinstance(self.keep, str) or not 0 < self.keep <= 1:
            raise BadOption(
                f"{_option('keep', self.keep)}; give a number above 0 and at most 1, such as 0.01"
            )
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Refuse options that would contradict each other, or have no effect."""
        compressed = self.compress != "none"
        if self.collective != "native" and compressed:
            raise BadOption(
                f"{_option('compress', self.compress)}, but '{self.collective}' adds up plain numbers; leave "
                "'collective' at native, or 'compress' at none"
            )
        if self.reduce != "mean" and (compressed or self.collective != "native"):
            raise BadOption(
                f"{_option('reduce', self.reduce)}, which exchanges whole gradients in its own way; leave "
                "'collective' at native and 'compress' at none"
            )
        if self.compress_inside and not compressed:
            raise BadOption(
                f"{_option('compress_inside', True)}, but nothing is compressed; set 'compress' to "
                f"{_one_of(COMPRESSIONS)}"
            )
        for name, owner in (("keep", "top_k"), ("rank", "power_sgd")):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default and self.compress != owner:
                raise BadOption(f"{_option(name, value)}, which has an effect with compress={owner} alone")

    @property
    @override
    def passes(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        if self.collective != "native":
            return _WholeWorker(replica, comm, optimizer, clip, COLLECTIVES[self.collective])
        if self.reduce != "mean":
            return _WholeWorker(replica, comm, optimizer, clip, REDUCTIONS[self.reduce])
        between = COMPRESSIONS[self.compress](self) if self.compress != "none" else Native
        if self.compress_inside:
            return _WholeWorker(replica, comm, optimizer, clip, between)
        # The factors of a matrix are those of the whole matrix.
        whole = self.compress == "power_sgd"
        return _SharedWorker(replica, comm, optimizer, clip, between, whole)


def _coded(codec: Codec) -> MakeReduction:
    return partial(Compressed, codec=codec)


COLLECTIVES: Final[dict[str, MakeReduction]] = {
    "native": Native,
    "mpi": Native,
    **{name: partial(ByMessages, algorithm=algorithm) for name, algorithm in ALGORITHMS.items()},
}
"""How sums of plain numbers are formed, by name."""

REDUCTIONS: Final[dict[str, MakeReduction]] = {"mean": Native, "adasum": Adaptive}
"""What is made of the workers' gradients, by name."""

COMPRESSIONS: Final[dict[str, Callable[[Sync], MakeReduction]]] = {
    "bf16": lambda _: _coded(Cast(torch.bfloat16)),
    "fp16": lambda _: _coded(Cast(torch.float16)),
    "int8": lambda _: _coded(Int8()),
    "top_k": lambda options: _coded(TopK(options.keep)),
    "sign": lambda _: _coded(Sign()),
    "power_sgd": lambda options: partial(LowRank, rank=options.rank),
}
"""What gradients become on their way, by name."""


def _option(name: str, value: object) -> str:
    return f"option '{name}' of strategy 'sync' is {value!r}"


def _one_of(known: Sequence[object] | dict[str, object]) -> str:
    names = [str(name) for name in known]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _require_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadOption(f"{_option(name, value)}; give a whole number, the smallest possible is 1")


def _require_one_of(name: str, value: object, known: Sequence[object] | dict[str, object]) -> None:
    if value not in known:
        raise BadOption(f"{_option(name, value)}; give {_one_of(known)}")


class _Part:
    """A piece of this rank's slice: the host's gradients for it, and the optimizer that moves it."""

    def __init__(self, piece: Piece, rows: Sequence[Tensor]) -> None:
        self._piece = piece
        # Rows are added in the order of ranks, so that the sum is the same in every run.
        self.total, *self._others = (row[piece.place] for row in rows)

    def sum(self) -> None:
        """Add up the host's rows in the first one; leave the others at zero for the next backward pass."""
        add_up(self.total, self._others)

    def move(self) -> None:
        """Move the weights by the sum, and leave that at zero too."""
        self._piece.step()
        self.total.zero_()


class _SyncWorker(Worker):
    """Moves this rank's slice of the host's weights.

    Args:
        rows: for each of the replica's vectors, the gradients to be added up on this host; the sum is formed in
            the first one.
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
        # The k-th ranks of all hosts own the k-th slice together; a rank that some host lacks owns none.
        lanes = min(cast(list[int], comm.all_gather_objects(comm.node.size)))
        self._lane = comm.node.rank if comm.node.rank < lanes else None
        self._slices = [
            slice(0, 0) if self._lane is None else own_slices(flat, lanes, optimizer, whole)[self._lane]
            for flat in replica.flats
        ]
        totals = [first for first, *_ in rows]
        self._optimizer = ShardedOptimizer(optimizer, replica, self._slices, totals)
        of_flat = {id(flat): vectors for flat, vectors in zip(replica.flats, rows, strict=True)}
        self._parts = [_Part(piece, of_flat[id(piece.flat)]) for piece in self._optimizer.pieces]
        self._totals = [
            total[own] for total, own in zip(totals, self._slices, strict=True) if own.start < own.stop
        ]
        self._squares = comm.node.shared(lanes, dtype=torch.float64) if clip.norm is not None else None

    @override
    def step(self) -> None:
        began = self._clock()
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


class _SharedWorker(_SyncWorker):
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
            pair for pair in zip(replica.flats, self._slices, strict=True) if len(range(*pair[1].indices(1)))
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
    def _meet(self) -> None:
        self._node.barrier()

    @override
    def _sum_and_move(self) -> int:
        if not self._between and self._squares is None:
            # One piece after the other, each while its gradients are in the cache.
            for part in self._parts:
                part.sum()
                if self._clip.value is not None:
                    clip_values([part.total], self._clip.value)
                part.move()
            return self._inside
        for part in self._parts:
            part.sum()
        sent = self._inside
        if self._between:
            began = self._clock()
            sent += sum(map(Reduction.all_reduce, self._between, self._totals))
            self.traffic.wait_s += self._clock() - began
        self._clip_and_move()
        return sent


class _WholeWorker(_SyncWorker):
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
        self._sent = 0

    @override
    def _meet(self) -> None:
        # No rank has the result before all have given their gradients: this is a barrier too.
        self._sent = sum(map(Reduction.all_reduce, self._reductions, self._grads))

    @override
    def _sum_and_move(self) -> int:
        self._clip_and_move()
        for grads in self._grads:
            grads.zero_()
        return self._sent
