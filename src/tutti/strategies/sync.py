"""Synchronous data parallelism: all workers step together, as one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final

import torch
from torch.optim import Optimizer
from typing_extensions import override

from tutti.algorithms import ALGORITHMS
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.reduction import Adaptive, ByMessages, Compressed, LowRank, Native
from tutti.replica import Replica
from tutti.rules.compression import Cast, Codec, Int8, Sign, TopK
from tutti.strategies.base import Clip, Home, Strategy, Worker
from tutti.strategies.joint_gradients import (
    JointGradients,
    MakeReduction,
    MeanGradients,
    ReducedGradients,
)
from tutti.strategies.sync_worker import SharedWorker, WholeWorker


@dataclass(frozen=True)
class Sync(Strategy):
    """Synchronous data-parallel training: the same weights as sequential training, at any number of workers.

        g = sum over the workers and passes of  g_worker        (each weighted by its share of the samples)
        w = optimizer(w, clip(g))

    Inside a host no gradient is copied: each rank sums its own slice over the gradients of all, and runs the
    optimizer on that slice of the one vector of weights. Across hosts, the owners of a slice add up what
    their hosts have. No rank holds more than its slice of the optimizer's state. An optimizer of your own may
    use what all parameters have together, such as a norm: rank 0 of each host runs it, on the whole model.

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
        compress: what gradients become on their way to other hosts: none, bf16, fp16, int8, top_k, sign or
            power_sgd. What is lost is added to the next gradient.
        keep: the share of a gradient's elements that `top_k` sends.
        rank: of the factors that `power_sgd` sends.
        compress_inside: compress every worker's gradient, inside a host too, not just the sums that hosts
            send each other.

    Raises:
        BadOption: a value is out of range, or two options do not go together.
    """

    name: ClassVar[str] = "sync"
    home: ClassVar[Home] = Home.SHARED
    joint_norm: ClassVar[bool] = True
    joins_gradients: ClassVar[bool] = True

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
        _require_share("keep", self.keep)
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
            if value != getattr(Sync, name) and self.compress != owner:
                raise BadOption(f"{_option(name, value)}, which has an effect with compress={owner} alone")

    @property
    @override
    def passes(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        if self.collective != "native":
            return WholeWorker(replica, comm, optimizer, clip, COLLECTIVES[self.collective])
        if self.reduce != "mean":
            return WholeWorker(replica, comm, optimizer, clip, REDUCTIONS[self.reduce])
        between = self._between()
        if self.compress_inside:
            return WholeWorker(replica, comm, optimizer, clip, between)
        # The factors of a matrix are those of the whole matrix.
        whole = self.compress == "power_sgd"
        return SharedWorker(replica, comm, optimizer, clip, between, whole)

    @override
    def joint(self, replica: Replica, comm: Communicator) -> JointGradients:
        if self.collective != "native":
            return ReducedGradients(replica, comm, COLLECTIVES[self.collective], between=False)
        if self.reduce != "mean":
            return ReducedGradients(replica, comm, REDUCTIONS[self.reduce], between=False)
        if self.compress_inside:
            return ReducedGradients(replica, comm, self._between(), between=False)
        if self.compress != "none" and comm.hosts > 1:
            whole = self.compress == "power_sgd"
            return ReducedGradients(replica, comm, self._between(), between=True, whole=whole)
        return MeanGradients(replica, comm)

    def _between(self) -> MakeReduction:
        return COMPRESSIONS[self.compress](self) if self.compress != "none" else Native


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


def _one_of(known: Collection[object]) -> str:
    names = [str(name) for name in known]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _require_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadOption(f"{_option(name, value)}; give a whole number, the smallest possible is 1")


def _require_share(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise BadOption(f"{_option(name, value)}; give a number above 0 and at most 1, such as 0.01")


def _require_one_of(name: str, value: object, known: Collection[object]) -> None:
    if value not in known:
        raise BadOption(f"{_option(name, value)}; give {_one_of(known)}")
