"""The ranks of a user's loop, and the batches that they are dealt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop.gradient_exchange import GradientExchange
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.places import IterationStart, length_of

Number = TypeVar("Number", float, Tensor)

JUDGED: Final = 3
"""The number of losses of a kind to check for sums."""

SUM: Final = 2
"""The number of reduction="sum" in torch's loss functions."""

TERMS: Final = ("AddBackward0", "SubBackward0", "NegBackward0")
"""Nodes whose inputs are the terms of a loss."""


class SampleCounts(NamedTuple):
    """The samples of a batch: this rank's own, and those of all ranks."""

    own: int
    all: int


@dataclass(eq=False)
class OpenIteration:
    """An unfinished iteration over dealt batches."""

    start: IterationStart | None = None  # its start; None: no checkpoints are taken
    counts: SampleCounts | None = None  # of its current batch
    samples: int = 0  # of this rank, in all its batches together
    trained: bool = False  # whether its batch was dealt with gradients enabled
    dealt: int = 0  # batches that this rank was dealt
    stepped: int = 0  # those before the last step of an optimizer
    waiting: list[SampleCounts] = field(default_factory=list)  # batches without a backward pass so far
    lag: int | None = None  # batches fetched ahead of their backward passes; None: unknown yet

    def note_pass(self) -> None:
        """Forget the batches whose backward pass has come."""
        if self.waiting:
            self.lag = len(self.waiting) - 1 if self.lag is None else self.lag
            self.waiting = self.waiting[len(self.waiting) - self.lag :]


@dataclass
class LoopBatches:
    """The ranks of a user's loop, and the batches that they are dealt."""

    comm: Communicator
    # the reduction over samples that `distribute` was given, "mean" or "sum"; None: a mean, which is checked
    reduction: str | None = None
    samples: int = 1  # this rank's samples of the batch dealt last; after a loop, of all its batches
    open: list[OpenIteration] = field(default_factory=list)  # the unfinished iterations, the innermost last
    unstepped: list[SampleCounts] = field(default_factory=list)  # the batches since the last step
    keeps_places: bool = False  # whether checkpoints are taken
    resumed: list[IterationStart] = field(default_factory=list)  # the starts of the next training iterations

    def __post_init__(self) -> None:
        # Of the last training batch dealt in the innermost loop; gradients are weighted by them.
        self.counts = self._before_all = SampleCounts(1, self.comm.size)
        self.exchange = GradientExchange(self.comm)
        self.loaders = WeakKeyDictionary[DataLoader[Any], DataLoader[Any]]()
        self._judged = Counter[str]()
        self._left: list[SampleCounts] = []

    def start_of(self, batches: object) -> IterationStart:
        """Return the start of an iteration, with its place if it was interrupted."""
        length = length_of(getattr(batches, "dataset", None))
        for one in self.resumed:
            if one.length == length:
                self.resumed.remove(one)
                return one
        return IterationStart(length)

    def note_step(self) -> None:
        """Count the batches so far as trained, as an optimizer has been stepped."""
        self.unstepped.clear()
        for one in self.open:
            one.stepped = one.dealt

    def begin_batch(self, mine: OpenIteration, counts: SampleCounts) -> None:
        """Note the counts of the batch that an iteration is dealt now."""
        self.samples = counts.own
        mine.counts, mine.trained = counts, torch.is_grad_enabled()
        mine.samples += counts.own
        mine.dealt += 1
        if mine.trained:
            self.exchange.meetings.batches += 1
            self.counts = counts
            if self.comm.size > 1:
                mine.waiting.append(counts)
            self.unstepped.append(counts)

    def begin_pass(self, roots: Sequence[Any]) -> float:
        """Begin a backward pass; return the weight of its loss, by this rank's share of the current batch.

        `roots` are the last nodes of its graph.
        """
        if self.comm.size == 1:
            return 1.0
        if self.open and not any(one.trained for one in self.open):
            raise BadOption(
                "backward() comes in a loop over shard() that runs under torch.no_grad(), as to evaluate; "
                "iterate over shard() with gradients on, and prepare batches under no_grad inside the loop"
            )
        self._refuse_other_shares()
        own, whole = self.counts
        if self.reduction is None and self.counts is not self._before_all and own:
            self._refuse_sums(roots, own)
        # Gradients are averaged over the ranks: with a share of n_i / n one counts size * n_i / n.
        if self.reduction == "sum":
            return float(self.comm.size if own else 0)
        return self.comm.size * own / whole if whole else 0.0

    def _refuse_other_shares(self) -> None:
        waiting = [counts for one in self.open for counts in one.waiting] or self._left
        if len(waiting) > 1 and not self._are_shared_alike(waiting):
            raise BadOption(
                f"backward() comes after batches of {sorted({counts.all for counts in waiting})} samples, "
                f"which {self.comm.size} ranks share unevenly; call it for each batch before shard() deals "
                "the next one, or give batches that the ranks can share evenly (drop_last=True)"
            )
        self._left = []
        for one in self.open:
            one.note_pass()

    def _are_shared_alike(self, batches: Sequence[SampleCounts]) -> bool:
        """Return whether a rank's share of each of these batches has the same weight."""
        size, wholes = self.comm.size, {counts.all for counts in batches}
        uneven = (whole < size if self.reduction == "sum" else whole % size for whole in wholes)
        return len(wholes) == 1 or not any(uneven)

    def _refuse_sums(self, roots: Sequence[Any], own: int) -> None:
        for root in roots:
            kind = root.name()
            if self._judged[kind] < JUDGED:
                self._judged[kind] += 1
                if is_sum(root, own):
                    raise BadOption(
                        "the loss is a sum over the samples, and distribute() takes it for their mean; give "
                        "distribute(..., reduction='sum'), or reduction='mean' if it is a mean"
                    )

    def close(self, ended: OpenIteration) -> None:
        """Continue with the batch of the enclosing loop, as an iteration has ended."""
        self.open.remove(ended)
        self._left = [] if self.open else ended.waiting
        if ended.dealt:
            self.samples = ended.samples
        around = next((one for one in reversed(self.open) if one.counts is not None), None)
        if around is not None and around.counts is not None and around.trained:
            self.counts = around.counts

    def whole_loss(self, loss: Number, batches: Sequence[SampleCounts]) -> Number:
        """Return the loss over all ranks, given this rank's from a closure (collective).

        `batches` were dealt in the closure; if there are none, the loss is of the current batch.
        """
        size, batches = self.comm.size, batches or [self.counts]
        table = torch.zeros(size, 2, dtype=torch.float64)
        table[self.comm.rank, 0] = plain(loss)
        table[self.comm.rank, 1] = sum(one.own for one in batches)
        losses, counts = self.add_up(Purpose.MEAN, *table.view(-1).tolist()).view(size, 2).unbind(1)
        if not self._are_shared_alike(batches):
            if self.reduction != "sum" and bool((losses == losses[0]).all()):
                return loss  # the closure has averaged it
            raise BadOption(
                f"the loss of a closure is over batches of {sorted({one.all for one in batches})} samples, "
                f"which {size} ranks share unevenly; give batches that they can share evenly "
                "(drop_last=True), or add up tutti.mean(loss) of each batch and return that"
            )
        there = counts > 0
        losses, counts = losses[there], counts[there]
        if self.reduction == "sum":
            return like(loss, losses.sum().item())
        return like(loss, ((losses * counts).sum() / counts.sum()).item())

    def add_up(self, purpose: Purpose, *figures: float) -> Tensor:
        """Sum figures over the ranks, in float64 (collective)."""
        sums = torch.tensor(figures, dtype=torch.float64)
        if self.comm.size > 1:
            self.exchange.meetings.come(purpose)
            self.comm.all_reduce(sums)
        return sums


def plain(value: Number) -> float:
    """Return the number in a figure, which may have a gradient."""
    return float(value.item() if isinstance(value, Tensor) else value)


def like(value: Number, figure: float, dtype: torch.dtype | None = None) -> Number:
    """Return a figure as a number, or as a tensor if `value` is one."""
    if not isinstance(value, Tensor):
        return figure
    return torch.full_like(value, figure, dtype=dtype, requires_grad=False)


def is_sum(root: Any, own: int) -> bool:
    """Return whether the loss with this node is recognisably a sum over a rank's `own` samples.

        cross_entropy(out, targets, reduction="sum")     (out - targets).square().sum() + penalty

    A sum that is multiplied or divided by something is taken for a mean.
    """
    nodes = [root]
    for node in nodes:  # grows
        if getattr(node, "_saved_reduction", None) == SUM or _sums_samples(node, own):
            return True
        if node.name() in TERMS:
            nodes += [one for one, _ in node.next_functions if one is not None]
    return False


def _sums_samples(node: Any, own: int) -> bool:
    """Return whether a node sums over a dimension of samples, or over all elements of such rows."""
    if not node.name().startswith("Sum"):
        return False
    sizes = node._saved_self_sym_sizes
    # Torch keeps -1 as 2^64 - 1.
    dims = [
        (dim - 2**64 if dim >= 2**63 else dim) % len(sizes)
        for dim in getattr(node, "_saved_dim", None) or range(len(sizes))
    ]
    return any(sizes[dim] == own or (dim == 0 and sizes[dim] % own == 0) for dim in dims)
