"""The state of a user's own loop: its ranks, its batch, and the steps of its optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop.fingerprints import length_of
from tutti.own_loop.gradient_exchange import GradientExchange
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.places import IterationStart, samplers_of
from tutti.own_loop.sums import is_sum
from tutti.replica import Replica
from tutti.state import Saved, State, Values
from tutti.strategies.base import Pace, Strategy

Number = TypeVar("Number", float, Tensor)

Closure = Callable[[], Tensor]
"""Computes the loss and its gradients once more, as torch's optimizers may be given it."""

JUDGED: Final = 3
"""How many losses of a kind are looked at: whether they are sums."""


class SampleCounts(NamedTuple):
    """The samples of a batch: this rank's own, and those of all ranks."""

    own: int
    all: int


@dataclass(eq=False)
class OpenIteration:
    """An unfinished iteration over dealt batches.

    Attributes:
        before: the counts before it.
        start: what it began with; None: no checkpoints are taken.
        counts: those of its batch.
        samples: how many this rank got of all its batches together.
        trained: whether its batch was dealt with gradients enabled.
        dealt: how many batches this rank was dealt.
        stepped: how many it had been dealt when an optimizer was stepped last.
        waiting: the counts of batches that may not have had their backward pass.
        lag: how many batches the program fetches ahead of its backward passes; None: unknown yet.
    """

    before: SampleCounts
    start: IterationStart | None = None
    counts: SampleCounts | None = None
    samples: int = 0
    trained: bool = False
    dealt: int = 0
    stepped: int = 0
    waiting: list[SampleCounts] = field(default_factory=list)
    lag: int | None = None

    def note_pass(self) -> None:
        """Forget the batches whose backward pass has come."""
        if self.waiting:
            self.lag = len(self.waiting) - 1 if self.lag is None else self.lag
            self.waiting = self.waiting[len(self.waiting) - self.lag :]


@dataclass
class OwnLoop:
    """The state of a user's loop: its ranks, its batches, and the models that `distribute` was given.

    Attributes:
        comm: all ranks.
        steppers: one for each optimizer.
        counts: those of the current batch, which gradients and steps are weighted by: the one that was dealt
            last to train on, in the innermost loop.
        samples: how many samples of this rank its figures are of: those of the batch that was dealt last;
            after a loop, those of all its batches.
        open: the iterations that go on, the innermost last.
        unstepped: the counts of the batches since the last step.
        judges: whether losses are looked at, as no model was given a `reduction`.
        loaders: of the parts of a loader whose workers are to live on.
        looked: data sets whose samples were compared between the ranks.
        exchange: of the models' gradients.
        keeps_places: whether checkpoints are taken.
        resumed: the places where the next iterations go on, to train.
        generators: those whose states checkpoints have.
        objects: what else has a state in them.
        folders: what ends the use of each folder of checkpoints.
    """

    comm: Communicator
    steppers: list[Stepper] = field(default_factory=list)
    samples: int = 1
    open: list[OpenIteration] = field(default_factory=list)
    unstepped: list[SampleCounts] = field(default_factory=list)
    judges: bool = True
    keeps_places: bool = False
    resumed: list[IterationStart] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    folders: dict[Path, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = self._before_all = SampleCounts(1, self.comm.size)
        self.exchange = GradientExchange(self.comm)
        self.loaders = WeakKeyDictionary[DataLoader[Any], DataLoader[Any]]()
        self.looked = cast("MutableMapping[object, bool]", WeakIdKeyDictionary())
        self._judged = Counter[str]()
        self._left: list[SampleCounts] = []

    @property
    def pace(self) -> Pace:
        """The relation of the workers' steps to each other."""
        return self.steppers[0].strategy.pace if self.steppers else Pace.TOGETHER

    def start_of(self, batches: object) -> IterationStart:
        """Return the start of an iteration, with the place where it goes on if it was interrupted."""
        length = length_of(getattr(batches, "dataset", None))
        for one in self.resumed:
            if one.length == length:
                self.resumed.remove(one)
                return one
        return IterationStart(length)

    def kept_samplers(self, batches: object) -> list[Any]:
        """Return the samplers of a loader whose states checkpoints have."""
        return [one for one in samplers_of(batches) if any(one is kept for kept in self.objects)]

    def note_step(self) -> None:
        """Take the batches that are there for trained, as an optimizer has been stepped."""
        self.unstepped.clear()
        for one in self.open:
            one.stepped = one.dealt

    def begin_batch(self, mine: OpenIteration, counts: SampleCounts) -> None:
        """Note the counts of the batch that an iteration is dealt now."""
        trains = torch.is_grad_enabled()
        self.samples = counts.own
        # Without gradients it is there to be evaluated, unless nothing else can be what is trained on.
        is_current = trains or not any(one.trained for one in self.open)
        mine.counts, mine.trained = counts, trains
        mine.samples += counts.own
        mine.dealt += 1
        self.exchange.meetings.batches += trains
        if is_current:
            self.train_on(counts)
            if self.comm.size > 1 and self.pace is Pace.TOGETHER:
                mine.waiting.append(counts)
            self.unstepped.append(counts)

    def train_on(self, counts: SampleCounts) -> None:
        """Make this the current batch."""
        if counts != self.counts:
            self.exchange.weigh(counts.own, counts.all)
        self.counts = counts

    def begin_pass(self, roots: Sequence[Any]) -> None:
        """Begin a backward pass, which is weighed by the current batch.

        Args:
            roots: the last nodes of its graph.

        Raises:
            BadOption: it may be of batches of which a rank has different shares, or its loss is a sum.
        """
        if self.comm.size > 1 and self.pace is Pace.TOGETHER:
            self._refuse_other_shares()
            if self.judges and self.counts is not self._before_all and self.counts.own:
                self._refuse_sums(roots)
        self.exchange.begin()

    def _refuse_other_shares(self) -> None:
        waiting = [counts for one in self.open for counts in one.waiting] or self._left
        if len(waiting) > 1:
            wholes = {counts.all for counts in waiting}
            if not _are_shared_alike(wholes, self.comm.size, all(stepper.sums for stepper in self.steppers)):
                raise BadOption(
                    f"backward() comes after batches of {sorted(wholes)} samples, of which a rank has "
                    f"different shares ({self.comm.size} ranks), so that its gradients cannot be weighed; "
                    "call it for each batch before shard() deals the next one, or give batches that the "
                    "ranks can share evenly (drop_last=True)"
                )
        self._left = []
        for one in self.open:
            one.note_pass()

    def _refuse_sums(self, roots: Sequence[Any]) -> None:
        for root in roots:
            kind = root.name()
            if self._judged[kind] < JUDGED:
                self._judged[kind] += 1
                if is_sum(root, self.counts.own):
                    raise BadOption(
                        "the loss is a sum over the samples, and distribute() takes it for their mean; give "
                        "distribute(..., reduction='sum'), or reduction='mean' if it is a mean all the same"
                    )

    def close(self, ended: OpenIteration) -> None:
        """Go on with the batch of the loop around, as an iteration has ended."""
        self.open.remove(ended)
        self._left = [] if self.open else ended.waiting
        others = [one for one in self.open if one.counts is not None]
        around = ([one for one in others if one.trained] or others)[-1:]
        if around and around[0].counts is not None:
            self.samples = around[0].counts.own
            self.train_on(around[0].counts)
            return
        if ended.counts is not None:
            self.samples = ended.samples
        if not ended.trained:
            self.train_on(ended.before)

    def whole_loss(self, loss: Number, batches: Sequence[SampleCounts], sums: bool) -> Number:
        """The loss over all ranks, of those that their closures return (collective).

        Args:
            loss: this rank's.
            batches: those that the closure has dealt; none: it is of the batch that is trained on.
            sums: losses are sums over samples, not means.

        Raises:
            BadOption: it is of several batches, and a rank's share of one is not that of another.
        """
        size, batches = self.comm.size, batches or [self.counts]
        table = torch.zeros(size, 2, dtype=torch.float64)
        table[self.comm.rank, 0] = plain(loss)
        table[self.comm.rank, 1] = sum(one.own for one in batches)
        losses, counts = self.add_up(Purpose.MEAN, *table.view(-1).tolist()).view(size, 2).unbind(1)
        wholes = {one.all for one in batches}
        if not _are_shared_alike(wholes, size, sums):
            if not sums and bool((losses == losses[0]).all()):
                return loss  # the closure has averaged it
            raise BadOption(
                f"the loss of a closure is over batches of {sorted(wholes)} samples, of which a rank has "
                f"different shares ({size} ranks), so that the loss of all cannot be told from the ranks'; "
                "give batches that they can share evenly (drop_last=True)"
                + ("" if sums else ", or add up tutti.mean(loss) of each batch and return that")
            )
        there = counts > 0
        losses, counts = losses[there], counts[there]
        return like(loss, (losses.sum() if sums else (losses * counts).sum() / counts.sum()).item())

    def add_up(self, purpose: Purpose, *figures: float) -> Tensor:
        """Sum figures over the ranks, in float64 (collective)."""
        sums = torch.tensor(figures, dtype=torch.float64)
        if self.comm.size > 1:
            self.exchange.meetings.come(purpose)
            with self.exchange.meetings.explaining(purpose):
                self.comm.all_reduce(sums)
        return sums


class ModuleHook:
    """A hook of a module, of which copies of the module have none: they are not trained here."""

    def __init__(self, call: Callable[..., None] | None) -> None:
        self._call = call

    def __call__(self, *given: object) -> None:
        """Call it with what torch gives."""
        if self._call is not None:
            self._call(*given)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None]]:
        return ModuleHook, (None,)


def _are_shared_alike(wholes: set[int], size: int, sums: bool) -> bool:
    """Return whether a rank's share of each of these batches, given by their samples, has the same weight."""
    return len(wholes) == 1 or not any(whole < size if sums else whole % size for whole in wholes)


def plain(value: Number) -> float:
    """Return the number in a figure, which may have a gradient."""
    return float(value.item() if isinstance(value, Tensor) else value)


def like(value: Number, figure: float, dtype: torch.dtype | None = None) -> Number:
    """Return a figure as a number, or as a tensor like `value`, if that is one."""
    if not isinstance(value, Tensor):
        return figure
    return torch.full_like(value, figure, dtype=dtype, requires_grad=False)


@dataclass(eq=False)
class Stepper(ABC):
    """Steps of all ranks, made of the calls of a user's loop.

    Attributes:
        replica: the model.
        optimizer: the user's, whose `step` is this stepper's from now on.
        strategy: how to train.
        sums: losses are sums over samples, not means.
        loop: the user's, which has the other steppers.
        steps: how many of its own steps a worker has made, if each has batches of its own.
    """

    replica: Replica
    optimizer: Optimizer
    strategy: Strategy
    sums: bool
    loop: OwnLoop

    def __post_init__(self) -> None:
        self._number = len(self.loop.steppers)
        self.steps = 0
        native = self.optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> object:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            found = self.step(native, closure)
            self.loop.note_step()
            return found

        # A scheduler that was made before warns of an optimizer whose step lacks its mark.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]

    @abstractmethod
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        """One call of the user's `optimizer.step()`, which was `native` before."""

    def settle(self, purpose: Purpose = Purpose.SETTLE) -> None:
        """Give the replica the weights to be evaluated (collective)."""
        return

    def resume(self) -> None:
        """Go on training after `settle` (collective)."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Give the replica the final weights, after the last step (collective)."""

    @abstractmethod
    def state(self) -> State:
        """Return all that the steps must know to go on, but for the model; between `settle` and `resume`."""

    @abstractmethod
    def load_state(self, saved: Saved, options: list[Values], same: bool) -> None:
        """Go on from the state of earlier steps (collective); the model has its weights.

        Args:
            saved: the state.
            options: of the optimizer's param groups.
            same: it is of the same strategy.
        """
