"""The state of a user's own loop: its ranks, its batch, and the steps of its optimizers."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop.fingerprints import Looked
from tutti.own_loop.gradient_exchange import GradientExchange
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.origins import (
    KEY,
    Origin,
    SampleCounts,
    Verdict,
    WatchedModel,
    ends_of,
    judge,
    note_origin,
)
from tutti.own_loop.places import IterationStart, ResumedIteration, samplers_of
from tutti.own_loop.structure import tensors_in
from tutti.replica import Replica
from tutti.state import Saved, State, Values
from tutti.strategies.base import Pace, Strategy

Number = TypeVar("Number", float, Tensor)

Closure = Callable[[], Tensor]
"""Computes the loss and its gradients once more, as torch's optimizers may be given it."""


@dataclass(eq=False)
class OpenIteration:
    """An unfinished iteration over dealt batches.

    Attributes:
        before: the counts before it.
        counts: those of its batch.
        samples: how many this rank got of all its batches together.
        trained: whether its batch was dealt with gradients enabled.
        start: what it began with; None: nobody wants to know.
        around: one that was under way when it began, and how many batches that had dealt then.
        first: how many batches of all ranks were left out at its beginning, as they were trained on earlier.
        dealt: how many batches this rank was dealt behind these.
        stepped: how many it had been dealt when an optimizer was stepped last.
        check: of the batches up to that.
    """

    before: SampleCounts
    counts: SampleCounts | None = None
    samples: int = 0
    trained: bool = False
    start: IterationStart | None = None
    around: tuple[OpenIteration, int] | None = None
    first: int = 0
    dealt: int = 0
    stepped: int = 0
    check: int = 0

    @property
    def is_inner(self) -> bool:
        """True if it is seen to be inside of a loop over another, which has not gone on since it began."""
        return self.around is not None and self.around[0].dealt == self.around[1] and self.dealt > 1

    def note_step(self) -> None:
        """Take the batches that were dealt until now for trained."""
        if self.stepped != self.dealt and self.counts is not None:
            self.stepped, self.check = self.dealt, self.counts.check


@dataclass
class OwnLoop:
    """The state of a user's loop: its ranks, its batches, and the models that `distribute` was given.

    Attributes:
        comm: all ranks.
        counts: those of the batch whose gradients came last, which steps are weighted by.
        batch: those of the current batch: the one that was dealt last to train on, in the innermost loop.
        steppers: one for each optimizer.
        last: those of the batch that was dealt last, also without gradients, such as one to evaluate.
        samples: how many samples of this rank its figures are of: those of that batch; after a loop, those
            of all its batches.
        open: the iterations that go on, the innermost last.
        counts_of: those of the batch that a tensor belongs to.
        loaders: of the parts of a loader whose workers are to live on.
        looked: data sets whose samples were compared between the ranks.
        exchange: of the models' gradients.
        keeps_places: whether somebody may ask how far an iteration has come.
        resumed: the places where the next iterations go on, to train.
        generators: those whose states checkpoints have.
        objects: what else has a state in them.
        folders: what ends the use of each folder of checkpoints.
        passed: whether a backward pass has come since the last step, that the exchange does not see; noticed
            only where checkpoints are taken.
    """

    comm: Communicator
    counts: SampleCounts
    steppers: list[Stepper] = field(default_factory=list)
    batch: SampleCounts = field(init=False)
    last: SampleCounts = field(init=False)
    samples: int = 1
    open: list[OpenIteration] = field(default_factory=list)
    keeps_places: bool = False
    resumed: list[ResumedIteration] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    folders: dict[Path, Callable[[], None]] = field(default_factory=dict)
    passed: bool = False

    def __post_init__(self) -> None:
        self.last = self.batch = self._before_all = self.counts
        self.exchange = GradientExchange(self.comm)
        self.counts_of = cast("MutableMapping[Tensor, SampleCounts]", WeakIdKeyDictionary())
        self.loaders = WeakKeyDictionary[DataLoader[Any], DataLoader[Any]]()
        self.looked = cast("Looked", WeakIdKeyDictionary())
        self._watched: list[WatchedModel] = []
        self._noted: list[SampleCounts] | None = None

    @property
    def pace(self) -> Pace:
        """The relation of the workers' steps to each other."""
        return self.steppers[0].strategy.pace if self.steppers else Pace.TOGETHER

    def kept_samplers(self, batches: object) -> list[Any]:
        """Return the samplers of a loader whose states checkpoints have."""
        return [one for one in samplers_of(batches) if any(one is kept for kept in self.objects)]

    def take_resumed(self, length: int) -> ResumedIteration | None:
        """Take the place where an iteration that begins now goes on; None: it begins anew.

        Several may have been under way, and the program may begin them in another order than then.

        Args:
            length: how many samples its data set has.
        """
        alike = [one for one in self.resumed if one.start.length == length]
        for one in (alike or self.resumed)[:1]:
            self.resumed.remove(one)
            return one
        return None

    def note_step(self) -> None:
        """Take the batches that are there for trained, as an optimizer has been stepped."""
        self.passed = False
        for one in self.open:
            one.note_step()

    def begin_batch(self, counts: SampleCounts) -> None:
        """Note the counts of the batch that is dealt now."""
        self.last, self.samples = counts, counts.own
        self.exchange.meetings.batches += torch.is_grad_enabled()
        # Without gradients it is there to be evaluated, unless nothing else can be what is trained on.
        if torch.is_grad_enabled() or not any(one.trained for one in self.open):
            self.train_on(counts)
            if self._noted is not None:
                self._noted.append(counts)

    @contextmanager
    def noting(self) -> Iterator[list[SampleCounts]]:
        """Inside, batches to train on are noted in the list: what a closure's loss is of."""
        before, noted = self._noted, list[SampleCounts]()
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = before

    def train_on(self, counts: SampleCounts) -> None:
        """Make this the current batch."""
        self.batch = self.counts = counts
        self.exchange.weigh(counts.own, counts.all)

    def watch(self, model: nn.Module, reduction: str | None) -> None:
        """Find out which batches the losses of a model are of.

        Args:
            model: the model.
            reduction: of its losses; None: each loss is judged.
        """
        watched = WatchedModel(model, reduction)
        self._watched.append(watched)

        def note_outputs(
            _: nn.Module, inputs: tuple[object, ...], named: dict[str, object], outputs: object
        ) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            found = [
                self.counts_of[known]
                for tensor in tensors_in((inputs, named))
                for known in (tensor, tensor._base)
                if known is not None and known in self.counts_of
            ]
            note_origin(outputs, Origin(tuple(dict.fromkeys(found)) or (self.batch,), watched))

        model.register_forward_hook(ModuleHook(note_outputs), with_kwargs=True)

    @contextmanager
    def passing(self, roots: Sequence[Any]) -> Iterator[None]:
        """Inside, a backward pass is made from these nodes."""
        if self.comm.size > 1:
            self._weigh(roots)
        self.exchange.begin()
        try:
            yield
        finally:
            self.exchange.end()

    def _weigh(self, roots: Sequence[Any]) -> None:
        """Weigh a backward pass by the batch that its models were called with.

        Args:
            roots: the last nodes of its graph.

        Raises:
            BadOption: it is of several batches of which a rank has different shares, or its loss is a sum.
        """
        ends = list(ends_of(roots))
        origins: list[Origin] = [end.metadata[KEY] for end in ends if KEY in end.metadata]
        batches = list(dict.fromkeys(batch for one in origins for batch in one.batches)) or [self.batch]
        wholes, size = {batch.all for batch in batches}, self.comm.size
        alike = _are_shared_alike(wholes, size, all(stepper.sums for stepper in self.steppers))
        if not alike and not self._has_whole_batches():
            raise BadOption(
                f"one backward() is of batches of {sorted(wholes)} samples, of which a rank has different "
                f"shares ({size} ranks), so that its gradients cannot be weighed; call backward() for the "
                "loss of each batch, or give batches that the ranks can share evenly (drop_last=True)"
            )
        counts = batches[-1]
        if self.pace is Pace.TOGETHER and counts.own:
            self._refuse_sum(roots, counts, [one.model for one in origins] or self._models_of(ends))
        if (counts.own, counts.all) != (self.counts.own, self.counts.all):
            self.exchange.weigh(counts.own, counts.all)
        self.counts = counts

    def _models_of(self, ends: list[Any]) -> list[WatchedModel]:
        """Return the models that have parameters among the ends of a graph."""
        found = {id(end.variable) for end in ends if hasattr(end, "variable")}
        return [one for one in self._watched if any(id(p) in found for p in one.module.parameters())]

    def _refuse_sum(self, roots: Sequence[Any], counts: SampleCounts, models: list[WatchedModel]) -> None:
        """Refuse a loss that is a sum over samples; warn once of one that may be, for each model."""
        undeclared = [one for one in models if one.reduction is None]
        verdicts = {judge(root, counts.own) for root in roots} if undeclared else set()
        if Verdict.SUM in verdicts and counts is not self._before_all:
            raise BadOption(
                "the loss is a sum over the samples, and distribute() takes it for their mean; give "
                "distribute(..., reduction='sum'), or reduction='mean' if it is a mean all the same"
            )
        if verdicts <= {Verdict.MEAN} or all(one.is_warned for one in undeclared):
            return
        for one in undeclared:
            one.is_warned = True
        if self.comm.rank == 0:
            warnings.warn(
                "tutti takes this loss for a mean over the samples of the batch; if it is a sum, give "
                "distribute(..., reduction='sum'). reduction='mean' declares a mean, without this warning",
                stacklevel=7,
            )

    def _has_whole_batches(self) -> bool:
        """Return whether each rank has batches of its own, and so no weight but 1."""
        return self.pace is not Pace.TOGETHER and all(one.strategy.passes == 1 for one in self.steppers)

    def close(self, ended: OpenIteration) -> None:
        """Go on with the batch of the loop around, as an iteration has ended."""
        self.open.remove(ended)
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
        check: compares what the ranks hold alike.
        steps: how many of its own steps a worker has made, if each has batches of its own.
        latest: the number of the latest of them, counted over all steppers of the loop.
    """

    replica: Replica
    optimizer: Optimizer
    strategy: Strategy
    sums: bool
    loop: OwnLoop

    def __post_init__(self) -> None:
        self._number = len(self.loop.steppers)
        self._calls, self._own, self._samples = 0, 0, 0
        self._pending: dict[nn.Parameter, Tensor] = {}
        self.steps = self.latest = 0
        native = self.optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> object:
            found = self.step(native, closure)
            self.loop.note_step()
            return found

        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]

    @abstractmethod
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        """One call of the user's `optimizer.step()`, which was `native` before."""

    def skip(self) -> None:
        """Take part in a step for which the other ranks have a batch, and this one has none."""
        return

    def settle(self, purpose: Purpose = Purpose.SETTLE) -> None:
        """Give the replica the weights to be evaluated (collective)."""
        return

    def resume(self) -> None:
        """Go on training after `settle` (collective)."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Give the replica the final weights, after the last step (collective)."""

    @property
    def gathered(self) -> int:
        """Count of the passes gathered for a step that is still to come."""
        return self._calls

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

    def _gather(self, own: int, whole: int) -> None:
        """Keep this pass' gradient, weighted by its samples; after the last pass, step by all of them."""
        self._calls, self._own, self._samples = self._calls + 1, self._own + own, self._samples + whole
        for parameter in self.replica.module.parameters():
            if parameter.grad is not None and own:
                new = parameter.grad.detach() * (1 if self.sums else own)
                known = self._pending.get(parameter)
                self._pending[parameter] = new if known is None else known + new
            parameter.grad = None
        if self._calls == self.strategy.passes:
            self._use_gathered()

    def _use_gathered(self) -> None:
        """Step by what was gathered."""
        for parameter, gradient in self._pending.items():
            parameter.grad = gradient if self.sums else gradient / self._samples
        self._step(self._own, self._samples)
        for parameter in self._pending:
            parameter.grad = None
        self._pending, self._calls, self._own, self._samples = {}, 0, 0, 0

    @abstractmethod
    def _step(self, own: int, whole: int) -> Any:
        """Step by the parameters' gradients, which are of `own` samples of this rank among `whole`."""
