"""Synchronous data parallelism: all workers make each step together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.allreduce import ALGORITHMS
from tutti.allreduce.adasum import Adasum
from tutti.allreduce.base import GradientLayout, GradientReduction, MakeReduction
from tutti.allreduce.compression import Cast, Codec, Compressed, Int8, TopK
from tutti.allreduce.exact import ByMessages, Native
from tutti.allreduce.powersgd import PowerSGD
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.clipping import clip_values, scale_for
from tutti.optim.sharded import FlatPiece, ShardedOptimizer, own_slices
from tutti.registry import part
from tutti.replica import Missing, NormShare, Replica, squared_norm
from tutti.state import LocalState, Saved, State
from tutti.strategies.base import Clip, Strategy, WeightPlacement, Worker
from tutti.strategies.gradient_sum import JointlyMissing, add_up
from tutti.strategies.options import choice, number, whole


class _SlicePiece:
    """A piece of this rank's slice: the host's gradients for it, and the optimizer that moves it."""

    def __init__(self, piece: FlatPiece, rows: Sequence[Tensor]) -> None:
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
    """A worker that moves its slice of the host's weights."""

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        optimizer: Optimizer,
        clip: Clip,
        between: MakeReduction,  # of a slice's sums, between hosts
        of_all: MakeReduction | None = None,  # of all ranks' whole gradients, instead of slices
        whole: bool = False,  # keep each parameter in one slice
    ) -> None:
        super().__init__()
        self._node, self._clip, self._clock = comm.node, clip, comm.clock
        self.share = 1 / comm.size
        self._sizes = cast("list[int]", comm.all_gather_objects(comm.node.size))
        lanes = min(self._sizes)
        self._lane = comm.node.rank if comm.node.rank < lanes else None
        slices = [
            slice(0, 0) if self._lane is None else own_slices(flat, lanes, optimizer, whole)[self._lane]
            for flat in replica.flats
        ]
        # The gradients that are added up on this host; the sum is formed in the first ones.
        rows = [list(flat.rows) if of_all is None else [flat.grads] for flat in replica.flats]
        totals = [first for first, *_ in rows]
        self._optimizer = ShardedOptimizer(optimizer, replica, slices, totals)
        self._missing = JointlyMissing(replica, comm, totals, slices)
        of_flat = {id(flat): vectors for flat, vectors in zip(replica.flats, rows, strict=True)}
        self._parts = [_SlicePiece(piece, of_flat[id(piece.flat)]) for piece in self._optimizer.pieces]
        owned = [
            (flat, total, own)
            for flat, total, own in zip(replica.flats, totals, slices, strict=True)
            if own.start < own.stop
        ]
        self._totals = [total[own] for _, total, own in owned]
        self._whole = [] if of_all is None else totals
        self._reductions: list[GradientReduction] = []
        cross = comm.cross
        if of_all is not None:
            everything = [GradientLayout.of(flat, slice(0, len(flat.grads))) for flat in replica.flats]
            self._reductions = [of_all(comm, layout) for layout in everything]
        elif cross is not None and cross.size > 1:
            self._reductions = [between(cross, GradientLayout.of(flat, own)) for flat, _, own in owned]
        if any(reduction.state() for reduction in self._reductions):
            self.restarts = ("what compression has left out of earlier gradients",)
        # Gradients that others read, and the slice of the weights that it writes for them.
        shares = of_all is None and comm.node.size > 1
        self._inside = sum(flat.grads.nbytes for flat in replica.flats) if shares else 0
        self._squares = comm.node.shared(lanes, dtype=torch.float64) if clip.norm is not None else None
        self._counted = [part.total for part in self._parts]
        self._share = replica.gradients.share
        if self._share is not None:
            self._counted = list(_counted(replica, totals, slices, self._share))

    @override
    def step(self) -> None:
        began, sent = self._clock(), self._inside
        self._missing.note()
        if self._whole:
            # No rank has the result before all have given their gradients: this is a barrier too.
            sent += self._reduce(self._whole)
        else:
            self._node.barrier()
        met = self._clock()
        self._optimizer.begin()
        sent += self._sum_and_move()
        for vector in self._whole:
            vector.zero_()
        moved = self._clock()
        self._node.barrier()
        self.traffic.add(sent, met - began + self._clock() - moved, staleness=0)

    def _sum_and_move(self) -> int:
        """Sum the gradients and move this rank's slices; returns the bytes sent to other hosts."""
        if not self._reductions and self._squares is None and not self._optimizer.joint:
            missing = self._missing.find()
            # One piece after the other, each while its gradients are in the cache.
            for part in self._parts:
                part.sum()
                with self.updating:
                    if self._clip.value is not None:
                        clip_values([part.total], self._clip.value)
                    part.move(missing)
            return 0
        for part in self._parts:
            part.sum()
        sent = 0
        if self._reductions and not self._whole:
            began = self._clock()
            sent = self._reduce(self._totals)
            self.traffic.wait_s += self._clock() - began
        self._clip_and_move()
        return sent

    def _reduce(self, vectors: Sequence[Tensor]) -> int:
        """Reduce one vector after the other; returns the bytes sent."""
        pairs = zip(self._reductions, vectors, strict=True)
        return sum(reduction.all_reduce(vector, self.share) for reduction, vector in pairs)

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
        """Return the 2-norm of the whole gradient, bit-equal on all ranks: squares are added in one order."""
        if self._lane is not None:
            squares[self._lane] = squared_norm(self._counted)
        # The next write is after the barrier at the end of this step, when all have read.
        self._node.barrier()
        total = sum(squares.tolist())
        return math.sqrt(total if self._share is None else self._share.add_up(total))

    @override
    def state(self) -> State:
        """Return the optimizer's state for this rank's slice, and what its reductions remember."""
        kept = [reduction.state() for reduction in self._reductions]
        # For a parameter without a gradient, compression may have left something in only some slices.
        alone = self._optimizer.counters() if any(kept) else LocalState()
        return State(self._optimizer.state(), alone, own={"reductions": kept, "node_sizes": self._sizes})

    @override
    def load_state(self, saved: Saved) -> None:
        """Load the reductions' state, if the slices are the same; the optimizer already has its own."""
        if saved.own is not None and saved.own.get("node_sizes") == self._sizes:
            for reduction, values in zip(self._reductions, saved.own["reductions"], strict=True):
                reduction.load_state(values)

    @override
    def finish(self) -> None:
        """Do nothing: every step leaves the final weights in every replica."""


def _counted(
    replica: Replica, totals: Sequence[Tensor], slices: Sequence[slice], share: NormShare
) -> Iterator[Tensor]:
    """Yield the parts of this rank's slices that count in the norm of a model divided over a team."""
    for flat, total, own in zip(replica.flats, totals, slices, strict=True):
        for parameter, span in zip(flat.parameters, flat.spans, strict=True):
            start, stop = max(span.start, own.start), min(span.stop, own.stop)
            if start < stop and share.counts(parameter):
                yield total[start:stop]


COLLECTIVES: Final = ("native", "mpi", *ALGORITHMS)
"""All-reduces of plain numbers."""


def _coded(codec: Codec) -> MakeReduction:
    return partial(Compressed, codec=codec)


COMPRESSIONS: Final[dict[str, Callable[[Sync], MakeReduction]]] = {
    "bf16": lambda _: _coded(Cast(torch.bfloat16)),
    "fp16": lambda _: _coded(Cast(torch.float16)),
    "int8": lambda _: _coded(Int8()),
    "top_k": lambda options: _coded(TopK(options.keep)),
    "power_sgd": lambda options: partial(PowerSGD, rank=options.rank),
}
"""Compressions of gradients between hosts, by name."""


@part("sync")
@dataclass(frozen=True)
class Sync(Strategy):
    """Synchronous data-parallel training: the same weights as sequential training, at any number of workers.

        g = sum over the workers and passes of g_worker        (each weighted by its share of the samples)
        w = optimizer(w, clip(g))

    Inside a host no gradient is copied: each rank sums its slice over the gradients of all ranks, and runs
    the optimizer on that slice of the shared weights. Across hosts, the owners of a slice add up their hosts'
    sums. No rank holds more than its slice of the optimizer's state. A custom optimizer may combine all
    parameters, as in a norm: rank 0 of each host runs it, on the whole model.

        rank 0  backward │ sum 0  (across)  optimizer 0  zero 0 │ next forward
        rank 1  backward │ sum 1  (across)  optimizer 1  zero 1 │ next forward
        rank 2  backward │ sum 2  (across)  optimizer 2  zero 2 │ next forward
                         A                                      B

    Barrier A: every gradient of the host is complete. Barrier B: every slice of the weights is updated, and
    every slice of the gradients zero. Clipping by norm needs one more barrier before the optimizer, which
    waits for all slices' sums of squares. Otherwise `sum`, `optimizer` and `zero` run piece by piece, so that
    a gradient is fetched from memory once.

    With `every` passes for one update (gradient accumulation) the batch is split over them as well.

    The other options replace the sum. `compress` acts on the sums that the owners of a slice exchange across
    hosts; what it loses is added to the next gradient. Any other `collective` ("mpi": the communicator's own
    all-reduce, which is MPI's between hosts; the rest by messages between two ranks, see `tutti.allreduce`),
    `reduce="adasum"` and `compress_inside` act on whole gradients of all workers instead:

        rank 0  backward │ g = reduce(g 0, g 1, g 2)  optimizer 0  zero │ next forward
        rank 1  backward │ g = reduce(g 0, g 1, g 2)  optimizer 1  zero │ next forward
        rank 2  backward │ g = reduce(g 0, g 1, g 2)  optimizer 2  zero │ next forward

    Sources: Chen et al. 2016, "Revisiting Distributed Synchronous SGD" (the equation). Rajbhandari et al.
    2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1 (the optimizer's
    state in slices). Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"
    (all-reduce in two levels). Of the options: `tutti.allreduce.ALGORITHMS`, `tutti.allreduce.adasum`,
    `tutti.allreduce.compression` (Karimireddy et al. 2019: error feedback) and `tutti.allreduce.powersgd`
    (Vogels et al. 2019: PowerSGD).
    """

    home: ClassVar[WeightPlacement] = WeightPlacement.SHARED
    joint_norm: ClassVar[bool] = True

    every: int = whole(1, "passes of each worker for one update")
    collective: str = choice("native", "how the sum is formed", COLLECTIVES)
    reduce: str = choice("mean", "what is formed of the workers' gradients", ("mean", "adasum"))
    compress: str = choice(
        "none", "the form in which gradients travel between hosts", ("none", *COMPRESSIONS)
    )
    keep: float = number(0.01, "share of the elements that top_k sends", above=0, most=1)
    rank: int = whole(2, "rank of the factors that power_sgd sends")
    compress_inside: bool = choice(False, "compress inside a host too", (False, True))

    @override
    def __post_init__(self) -> None:
        """Refuse options that contradict each other, or have no effect."""
        super().__post_init__()
        compressed = self.compress != "none"
        if self.collective != "native" and compressed:
            raise BadOption(
                f"{self.as_given('compress')}, but '{self.collective}' adds up plain numbers; leave "
                "'collective' at native, or 'compress' at none"
            )
        if self.reduce != "mean" and (compressed or self.collective != "native"):
            raise BadOption(
                f"{self.as_given('reduce')}, which exchanges whole gradients in its own way; leave "
                "'collective' at native and 'compress' at none"
            )
        if self.compress_inside and not compressed:
            raise BadOption(
                f"{self.as_given('compress_inside')}, but nothing is compressed; set 'compress' to one of "
                f"{', '.join(COMPRESSIONS)}"
            )
        for name, owner in (("keep", "top_k"), ("rank", "power_sgd")):
            if getattr(self, name) != getattr(Sync, name) and self.compress != owner:
                raise BadOption(f"{self.as_given(name)}, which has an effect with compress={owner} alone")

    @property
    @override
    def passes(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        of_all = self._of_whole_gradients()
        # PowerSGD factors whole matrices: no parameter may be cut.
        whole = of_all is None and self.compress == "power_sgd"
        return SyncWorker(replica, comm, optimizer, clip, self._between(), of_all, whole)

    def _of_whole_gradients(self) -> MakeReduction | None:
        """Return the reduction of all workers' whole gradients; None where slices are summed."""
        if self.collective in ALGORITHMS:
            return partial(ByMessages, algorithm=ALGORITHMS[self.collective])
        if self.collective != "native":
            return Native
        if self.reduce != "mean":
            return Adasum
        return self._between() if self.compress_inside else None

    def _between(self) -> MakeReduction:
        return COMPRESSIONS[self.compress](self) if self.compress != "none" else Native
