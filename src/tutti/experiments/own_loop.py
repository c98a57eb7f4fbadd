"""`init`, `distribute`, `shard`, `mean`, `settled` and `finish`: for people with a loop of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from tutti import strategies
from tutti.comm.base import Communicator, cut
from tutti.errors import BadModel, BadOption, refuse_other
from tutti.experiments.gradient_exchange import GradientExchange, Purpose
from tutti.launch.join import join
from tutti.replica import Replica
from tutti.strategies.base import Clip, Home, Pace, Strategy, Worker
from tutti.strategies.divided import DividedOptimizer
from tutti.training.evaluate import average_buffers

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

Closure = Callable[[], Tensor]
"""Computes the loss and its gradients once more, as torch's optimizers may be given it."""

AHEAD = 32
"""Batches of indices that rank 0 draws from the loader's sampler at a time."""


@dataclass
class Dealt:
    """How many samples this rank got of the batch that `shard` dealt last, and how many all ranks did."""

    own: int = 1
    all: int = 1


@dataclass(eq=False)
class Open:
    """An iteration over dealt batches that goes on.

    Attributes:
        before: the counts before it.
        dealt: those of its batch.
        trained: whether that was dealt with gradients enabled.
    """

    before: Dealt
    dealt: Dealt | None = None
    trained: bool = False


@dataclass
class Job:
    """What `init` found, what the loop deals, and the models that `distribute` was given.

    Attributes:
        comm: all ranks.
        dealt: the batch that is trained on.
        steppers: one for each optimizer.
        last: the batch that was dealt last, also without gradients, such as one to evaluate.
        open: the iterations that go on, the innermost last.
        deals: the counts of the batch that a tensor belongs to.
        exchange: of the models' gradients.
    """

    comm: Communicator
    dealt: Dealt
    steppers: list[Stepper] = field(default_factory=list)
    last: Dealt = field(default_factory=Dealt)
    open: list[Open] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exchange = GradientExchange(self.comm)
        self.deals = cast("MutableMapping[Tensor, Dealt]", WeakIdKeyDictionary())
        self._looking: set[nn.Module] = set()

    @property
    def pace(self) -> Pace:
        """How the workers' steps relate to each other."""
        return self.steppers[0].pace if self.steppers else Pace.TOGETHER

    def deal(self, deal: Dealt) -> None:
        """Note the counts of the batch that is dealt now."""
        self.last = deal
        # Without gradients it is there to be evaluated, unless nothing else can be what is trained on.
        if torch.is_grad_enabled() or not any(one.trained for one in self.open):
            if self.exchange.unused:
                self._look_at_inputs()
            self.train_on(deal)

    def train_on(self, deal: Dealt) -> None:
        """Weigh gradients by the counts of this batch from now on."""
        self.dealt.own, self.dealt.all = deal.own, deal.all
        self.exchange.weigh(deal.own, deal.all)

    def close(self, ended: Open) -> None:
        """Go on with the batch of the loop around, as an iteration has ended."""
        self.open.remove(ended)
        others = [one for one in self.open if one.dealt is not None]
        around = ([one for one in others if one.trained] or others)[-1:]
        if around and around[0].dealt is not None:
            self.last = around[0].dealt
            self.train_on(around[0].dealt)
        elif not ended.trained:
            self.train_on(ended.before)

    def _look_at_inputs(self) -> None:
        """Find by what a model is called with which batch it is trained on, as one was fetched ahead."""
        for stepper in self.steppers:
            model = stepper.replica.module
            if model not in self._looking:
                self._looking.add(model)
                model.register_forward_pre_hook(Looking(self), with_kwargs=True)


class Looking:
    """A module's hook before `forward`: gradients are weighed by the batch that it is called with.

    Copies of the module have none: they are not trained here.
    """

    def __init__(self, job: Job | None) -> None:
        self._job = job

    def __call__(self, module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        """Look for a tensor that was dealt, or for a view of one."""
        if torch.compiler.is_compiling() or self._job is None or not torch.is_grad_enabled():
            return
        for tensor in _tensors((inputs, named)):
            for known in (tensor, tensor._base):
                if known is not None and known in self._job.deals:
                    self._job.train_on(self._job.deals[known])
                    return

    def __deepcopy__(self, memo: object) -> Looking:
        return Looking(None)

    def __reduce__(self) -> tuple[type[Looking], tuple[None]]:
        return Looking, (None,)


_job: Job | None = None


def init() -> Communicator:
    """Join the ranks that this program was started with; call it once, before anything else of tutti.

    `tutti run -n 4 PROGRAM`, `mpirun -n 4 python PROGRAM` and `srun -n 4 python PROGRAM` start four ranks;
    a plain `python PROGRAM` is a world of one.

    Returns:
        The communicator of all ranks; `.rank` and `.size` say who this process is.
    """
    global _job
    if _job is None:
        _job = Job(join(), Dealt())
        _job.dealt = Dealt(1, _job.comm.size)
    return _job.comm


def distribute(
    model: Model,
    optimizer: AnyOptimizer,
    strategy: Strategy | str | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    reduction: str = "mean",
) -> tuple[Model, AnyOptimizer]:
    """Train `model` on all ranks; nothing else in the program changes.

    Every rank goes on from rank 0's weights. With the default strategy `parameter.grad` is the gradient of
    the whole batch on every rank as soon as `backward()` returns, and `optimizer.step()` moves the weights of
    all ranks by it: the program computes what it computes with plain torch on one process
    (docs/own-loop.md). With most others, gradients are the rank's own, and `optimizer.step()` is the
    strategy's step.

    Where the strategy gives every worker weights of its own, evaluate inside `with settled(model)`, and call
    `finish(model)` after the last step.

    Args:
        model: its parameters are re-pointed into flat vectors, values kept.
        optimizer: any torch optimizer over the model's parameters. Schedulers attached to it keep working.
        strategy: how to train, or its name; `Sync()` by default.
        clip_norm: largest 2-norm of the gradient of the whole model.
        clip_value: largest absolute value of an element of the gradient.
        reduction: what the loss is over the samples of a batch that `shard` dealt: their "mean" or their
            "sum".

    Returns:
        The same two objects.

    Raises:
        BadOption: what is given is no model, optimizer or strategy; or the strategy cannot use this many
            ranks, or another model of this program is trained at another pace, or this one already is.
        UnknownName: there is no strategy of this name.
    """
    chosen = _strategy(strategy)
    refuse_other(model, nn.Module, "model", "nn.Linear(2, 1)")
    refuse_other(optimizer, Optimizer, "optimizer", "torch.optim.Adam(model.parameters())")
    if reduction not in ("mean", "sum"):
        raise BadOption(f"reduction is {reduction!r}; give 'mean' or 'sum', whichever the loss is")
    comm, job = init(), _current()
    chosen.check(comm.size, comm.hosts)
    if job.steppers and chosen.pace is not job.pace:
        raise BadOption(
            f"strategy '{chosen.name}' ({chosen.pace.value}) cannot train beside that of the first model "
            f"({job.pace.value}): they need other batches; give both the same strategy"
        )
    if any(isinstance(one, JointStepper) and one.is_of(model, optimizer) for one in job.steppers):
        return model, optimizer
    clip = Clip(clip_norm, clip_value)
    if chosen.joins_gradients:
        stepper: Stepper = _joint(model, optimizer, chosen, clip, reduction == "sum", job)
    else:
        _refuse_known(model, job)
        replica = strategies.place(model, comm, chosen.home)
        replica.in_own_loop = True
        worker = chosen.worker(replica, comm, optimizer, clip)
        stepper = WorkerStepper(replica, worker, chosen, job.dealt, reduction == "sum")
        for part in model.modules():
            part.register_load_state_dict_post_hook(Adopting(worker))  # type: ignore[no-untyped-call]
    stepper.take_over(optimizer)
    job.steppers.append(stepper)
    return model, optimizer


def _strategy(strategy: Strategy | str | None) -> Strategy:
    if isinstance(strategy, str):
        return strategies.named(strategy)()
    refuse_other(strategy or strategies.Sync(), Strategy, "strategy", "tutti.Sync()")
    return strategy or strategies.Sync()


def _joint(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, clip: Clip, sums: bool, job: Job
) -> JointStepper:
    comm = job.comm
    known = [one for one in job.steppers if isinstance(one, JointStepper) and one.replica.module is model]
    if known:
        replica, copies, gradients = known[0].replica, known[0].copies, known[0].gradients
    else:
        _refuse_known(model, job)
        if comm.size > 1:
            _refuse_lookups_that_write(model)
        own = [(parameter, parameter.grad) for parameter in model.parameters()]
        memory, copies = strategies.visible_memory(comm)
        replica = strategies.place(model, comm, Home.PRIVATE, memory, frozen=True)
        if comm.size > 1 and replica.scattered:
            raise BadModel(
                f"parameter '{replica.scattered[0][0]}' of the model is divided by torch.distributed; "
                "distribute() takes models that each rank has whole"
            )
        for parameter, gradient in own:
            parameter.grad = gradient
        joint = strategy.joint(replica, comm)
        # What is reduced as a whole uses the rows for something else between the steps.
        gradients = [torch.zeros_like(flat.grads) if joint.records else flat.grads for flat in replica.flats]
        if comm.size > 1 or joint.records:
            job.exchange.add(joint, sums)
    apart = any(own is not flat.grads for own, flat in zip(gradients, replica.flats, strict=True))
    if apart and isinstance(optimizer, torch.optim.SparseAdam):
        raise BadOption(
            f"SparseAdam takes sparse gradients only, and strategy '{strategy.name}' with the options "
            f"{strategy.options()} makes them dense; give Sync() without options, or another optimizer"
        )
    return JointStepper(replica, optimizer, strategy, clip, sums, job, copies, gradients)


def _refuse_lookups_that_write(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise BadOption(
                f"the embedding '{name}' has max_norm={layer.max_norm}: it rewrites the rows that a rank "
                "looks up, and the other ranks do not; scale its weights in the loop, after each step"
            )


def _refuse_known(model: nn.Module, job: Job) -> None:
    known = {id(p) for stepper in job.steppers for p in stepper.replica.module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in known:
            raise BadOption(
                f"parameter '{name}' belongs to a model that distribute() was given before; give it the "
                "whole model once, or, with the default strategy, once for each optimizer"
            )


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Inside, `model` holds the weights to be evaluated, the same on all ranks (collective).

    These are the centre's or the workers' average where the workers have weights of their own; training goes
    on from their own afterwards. BatchNorm's statistics are averaged over the ranks, for good.

    Args:
        model: what `distribute` returned.

    Raises:
        BadOption: `distribute` was not given this model.
    """
    stepper = _steppers_of(model)[0]
    stepper.settle()
    average_buffers(stepper.replica, init())
    try:
        yield
    finally:
        stepper.resume()


def finish(model: nn.Module) -> None:
    """After the last step (collective): afterwards `model` has the final weights, the same on all ranks.

    Args:
        model: what `distribute` returned.

    Raises:
        BadOption: `distribute` was not given this model.
    """
    steppers = _steppers_of(model)
    for stepper in steppers:
        stepper.finish()
    average_buffers(steppers[0].replica, init())


Number = TypeVar("Number", float, Tensor)


def mean(value: Number, samples: int | None = None) -> Number:
    """The mean of a figure over the ranks, each weighted by its samples (collective).

    A learning-rate scheduler that is told a loss needs the same on all ranks:
    `scheduler.step(tutti.mean(loss))`.

    Args:
        value: this rank's, the mean over its own samples: a number, or a tensor of one element. Without
            samples it does not count.
        samples: over how many this rank has taken it; by default, how many `shard` dealt to it last.

    Returns:
        The same on all ranks, of the type of `value`. NaN if no rank has a sample.
    """
    comm, job = init(), _current()
    count = job.last.own if samples is None else samples
    total = torch.tensor([float(value) * count if count else 0.0, float(count)], dtype=torch.float64)
    if comm.size > 1:
        comm.all_reduce(total)
    over = (total[0] / total[1]).item()
    if isinstance(value, Tensor):
        return torch.full_like(value, over, requires_grad=False)
    return over


class shard:
    """A rank's own samples; together the ranks see each sample once.

    Where the workers make each update together, and where nothing is distributed, that is this rank's part of
    every batch. Where each worker makes its own updates, it is every so many-th batch, whole.

    Iterating yields batches of the same structure. Where a batch has fewer samples than there are ranks, a
    rank without any gets an empty batch under `torch.no_grad()`, and else one sample whose gradient does not
    count.

    Args:
        batches: a `DataLoader` (only this rank's samples are read; the order is that of rank 0's sampler), or
            any iterable, also a loader of an `IterableDataset`, that yields the same batches on every rank:
            tensors, or tuples, lists and dicts of them.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        init()
        job = _current()
        loads = (
            isinstance(self.batches, DataLoader)
            and self.batches.batch_sampler is not None
            and not isinstance(self.batches.dataset, IterableDataset)
        )
        own = _from_loader(cast("DataLoader[Any]", self.batches), job) if loads else None
        if job.pace is Pace.TOGETHER:
            dealt = own or (_own_part(batch, job) for batch in self.batches)
        else:
            dealt = own or _whole_batches(self.batches, job)
        mine = Open(replace(job.dealt))
        job.open.append(mine)
        try:
            for batch in dealt:
                mine.dealt, mine.trained = job.last, torch.is_grad_enabled()
                yield batch
        finally:
            job.close(mine)

    def __len__(self) -> int:
        init()
        job, batches = _current(), len(cast("Sized", self.batches))
        return batches if job.pace is Pace.TOGETHER else len(range(job.comm.rank, batches, job.comm.size))


class Stepper(ABC):
    """Turns the calls of a user's loop into steps of all ranks.

    Args:
        replica: the model.
        strategy: how it is trained.
        sums: losses are sums over samples, not means.

    Attributes:
        replica: the model.
        pace: how the ranks' steps relate to each other.
    """

    def __init__(self, replica: Replica, strategy: Strategy, sums: bool) -> None:
        self.replica, self.pace = replica, strategy.pace
        self._passes, self._sums = strategy.passes, sums
        self._calls, self._own, self._samples = 0, 0, 0

    def take_over(self, optimizer: Optimizer) -> None:
        """Put our `step` in place of the optimizer's own, which it calls."""
        native = optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> object:
            loss = self.step(native, closure)
            # torch's schedulers look at this to warn of `scheduler.step()` before `optimizer.step()`.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return loss

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    @abstractmethod
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        """One call of the user's `optimizer.step()`.

        Args:
            native: what that was before.
            closure: what it was given.
        """

    @abstractmethod
    def skip(self) -> None:
        """Take part in a step for which the other ranks have a batch, and this one has none."""

    def settle(self) -> None:
        """Give the replica the weights to be evaluated (collective)."""
        return

    def resume(self) -> None:
        """Go on training after `settle` (collective)."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Give the replica the final weights, after the last step (collective)."""


class JointStepper(Stepper):
    """The optimizer's own steps, on each rank, by gradients that are the same on all of them.

    Args:
        replica: the model.
        optimizer: the user's.
        strategy: how many passes are behind a step.
        clip: gradient clipping.
        sums: losses are sums over samples, not means.
        job: the ranks.
        copies: for each of the replica's vectors of weights, those of all ranks of this host.
        gradients: a vector of gradients for each of them, for the optimizer.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer,
        strategy: Strategy,
        clip: Clip,
        sums: bool,
        job: Job,
        copies: list[list[Tensor]],
        gradients: list[Tensor],
    ) -> None:
        super().__init__(replica, strategy, sums)
        self._optimizer, self._clip, self._job = optimizer, clip, job
        self.copies, self.gradients = copies, gradients
        self._number = len(job.steppers)
        self._native: Callable[..., Any] = optimizer.step
        self._divided = DividedOptimizer(optimizer, replica, copies, gradients, job.comm.node)
        self._fits = False
        self._pending: dict[nn.Parameter, Tensor] = {}
        self._lists: list[tuple[list[nn.Parameter], int]] = []

    def is_of(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Whether this is the stepper of both."""
        return self.replica.module is model and self._optimizer is optimizer

    @override
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        self._native = partial(self._divide, native)
        self._meet()
        if self._passes > 1:
            loss = _evaluate(closure)
            self._gather()
            if self._calls == self._passes:
                self._use_gathered()
            return loss
        if closure is None:
            self._limit()
            return self._native()

        def limited() -> Tensor:
            loss = closure()
            self._limit()
            # An optimizer that looks at the loss must see the same on all ranks.
            return mean(loss, self._job.dealt.own) if self._job.comm.size > 1 else loss

        return self._native(limited)

    def _divide(self, native: Callable[..., Any], closure: Closure | None = None) -> Any:
        """Step the optimizer, with the other ranks of the host if it allows that."""
        if not self._fits:
            self._divided.release()
            return native() if closure is None else native(closure)
        loss = _evaluate(closure)  # these optimizers want it once, at the beginning
        found = self._divided.step(native)
        return found if closure is None else loss

    @override
    def skip(self) -> None:
        """All ranks have a part of every batch."""

    @override
    def finish(self) -> None:
        if self._calls:
            self._use_gathered()

    def _meet(self) -> None:
        comm = self._job.comm
        if comm.size == 1:
            return
        self._job.exchange.bring_unseen()
        self._refuse_strangers()
        self._fits = self._divided.fits()
        if self._fits:
            self._divided.bring_weights()
        changed = self._fits and self._divided.changed()
        exchange = self._job.exchange
        details = (self._number, _hash_of(self._optimizer), int(changed), exchange.passes)
        table = exchange.meet(Purpose.STEP, details)
        exchange.passes = 0
        if len(table):
            _refuse_difference(table, self._optimizer, comm)
        if changed:
            self._divided.adopt()

    def _refuse_strangers(self) -> None:
        """Refuse parameters that have come to the optimizer, and that no model has: nobody exchanges them."""
        lists = [(group["params"], len(group["params"])) for group in self._optimizer.param_groups]
        if len(lists) == len(self._lists) and all(
            new is old and length == known
            for (new, length), (old, known) in zip(lists, self._lists, strict=True)
        ):
            return
        for number, (parameters, _) in enumerate(lists):
            for parameter in parameters:
                if parameter.requires_grad and not self._job.exchange.knows(parameter):
                    raise BadOption(
                        f"param group {number} of the optimizer has a parameter of shape "
                        f"{tuple(parameter.shape)} that no model had when distribute() was given it; make "
                        "the model whole, and load weights with assign=True, before distribute()"
                    )
        self._lists = lists

    def _limit(self) -> None:
        if self._clip.value is None and self._clip.norm is None:
            return
        parameters = [p for p in self.replica.module.parameters() if p.grad is not None]
        if self._clip.value is not None:
            nn.utils.clip_grad_value_(parameters, self._clip.value)
        if self._clip.norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip.norm)

    @torch.no_grad()
    def _gather(self) -> None:
        """Keep this pass' gradient, weighted by its samples."""
        whole = self._job.dealt.all
        self._calls, self._samples = self._calls + 1, self._samples + whole
        for parameter in self.replica.module.parameters():
            if parameter.grad is not None:
                new = parameter.grad * (1 if self._sums else whole)
                known = self._pending.get(parameter)
                self._pending[parameter] = new if known is None else known + new
                parameter.grad = None

    @torch.no_grad()
    def _use_gathered(self) -> None:
        """Step by what was gathered."""
        for parameter, gradient in self._pending.items():
            parameter.grad = gradient if self._sums else gradient / self._samples
        self._limit()
        self._native()
        for parameter in self._pending:
            parameter.grad = None
        self._pending, self._calls, self._samples = {}, 0, 0


class WorkerStepper(Stepper):
    """The steps of a strategy's worker, by this rank's own gradients.

    Between the steps the parameters' gradients are the user's: added up, zeroed and looked at as in torch.

    Args:
        replica: the model.
        worker: this rank's part in the strategy.
        strategy: it.
        dealt: what `shard` deals.
        sums: losses are sums over samples, not means.
    """

    def __init__(
        self, replica: Replica, worker: Worker, strategy: Strategy, dealt: Dealt, sums: bool
    ) -> None:
        super().__init__(replica, strategy, sums)
        self.worker, self._dealt = worker, dealt
        many = self._passes > 1
        self._pending = [torch.zeros_like(flat.grads) for flat in replica.flats] if many else []
        self._present: set[nn.Parameter] = set()
        self._inside = False
        for parameter in replica.module.parameters():
            parameter.grad = None

    @override
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        if self._inside:  # the worker steps the user's optimizer itself
            return native() if closure is None else native(closure)
        loss = _evaluate(closure)
        self._advance(self._dealt.own, self._dealt.all)
        return loss

    @override
    def skip(self) -> None:
        self._advance(0, 0)

    @override
    def settle(self) -> None:
        self.worker.settle()

    @override
    def resume(self) -> None:
        self.worker.resume()

    @override
    def finish(self) -> None:
        if self._calls and self._samples:
            self._use(self._pending, 1 if self._sums else 1 / self._samples)
        self.worker.finish()

    def _advance(self, own: int, whole: int) -> None:
        self._calls, self._own, self._samples = self._calls + 1, self._own + own, self._samples + whole
        if self._passes > 1:
            with self.replica.lent_gradients():
                self._gather(own)
            for parameter in self.replica.module.parameters():
                parameter.grad = None
            if self._calls < self._passes:
                return
            if self._samples:
                self._use(self._pending, 1 if self._sums else 1 / self._samples)
            else:
                self._skip()
        elif whole:
            share = float(own > 0) if self._sums else own / whole
            with self.replica.lent_gradients():
                for flat in self.replica.flats:
                    if share == 0:
                        flat.grads.zero_()
                    elif share != 1:
                        flat.grads.mul_(share)
                self._step()
        else:
            self._skip()

    def _use(self, gathered: list[Tensor], scale: float) -> None:
        with self.replica.lent_gradients(self._present):
            for flat, pending in zip(self.replica.flats, gathered, strict=True):
                torch.mul(pending, scale, out=flat.grads)
                pending.zero_()
            self._step()
        self._present.clear()

    def _step(self) -> None:
        self._inside = True
        if self.pace is Pace.TOGETHER:
            self.worker.share = self._own / self._samples
        try:
            self.worker.step()
        finally:
            self._inside = False
        self._calls, self._own, self._samples = 0, 0, 0

    def _skip(self) -> None:
        self._inside = True
        try:
            self.worker.skip()
        finally:
            self._inside = False
        self._calls, self._own, self._samples = 0, 0, 0

    def _gather(self, own: int) -> None:
        """Keep this pass' gradient, weighted by its samples."""
        for flat, pending in zip(self.replica.flats, self._pending, strict=True):
            if own:
                pending.add_(flat.grads, alpha=1 if self._sums else own)
            flat.grads.zero_()
        for parameter in self.replica.module.parameters():
            if parameter.grad is not None:
                self._present.add(parameter)


class Adopting:
    """A module's hook behind `load_state_dict`: the worker goes on from the weights that were loaded.

    Copies of the module have none: they are not trained here.
    """

    def __init__(self, worker: Worker | None) -> None:
        self._worker = worker

    def __call__(self, module: nn.Module, incompatible: object) -> None:
        """Take note of the new weights."""
        if self._worker is not None:
            self._worker.adopt()

    def __deepcopy__(self, memo: object) -> Adopting:
        return Adopting(None)

    def __reduce__(self) -> tuple[type[Adopting], tuple[None]]:
        return Adopting, (None,)


def _evaluate(closure: Closure | None) -> Tensor | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _options_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """The numbers among the optimizer's options, group by group."""
    return [
        {
            name: _number(value)
            for name, value in group.items()
            if isinstance(value, (int, float, tuple, Tensor))
        }
        for group in optimizer.param_groups
    ]


def _number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _hash_of(optimizer: Optimizer) -> int:
    """The same for the same options, in every process."""
    return hash(
        tuple(
            _number(value)
            for group in optimizer.param_groups
            for value in group.values()
            if isinstance(value, (int, float, tuple, Tensor))
        )
    )


def _refuse_difference(table: Tensor, optimizer: Optimizer, comm: Communicator) -> None:
    """Say in what the ranks that have come for a step differ (collective)."""
    if bool((table[:, :2] != table[0, :2]).any()):
        raise BadOption(
            f"the ranks step different optimizers at the same time: by rank, in the order of distribute(), "
            f"{table[:, 1].tolist()}; let every rank make the same steps"
        )
    if bool((table[:, 3] != table[0, 3]).any()):
        raise BadOption(
            "the optimizer's state was loaded or changed on some ranks and not on others: by rank, "
            f"{table[:, 3].tolist()}; do it on every rank"
        )
    passes = table[:, 4]
    if bool((passes[passes > 0] != passes.max()).any()):
        raise BadOption(
            "the ranks come to a step after different numbers of backward passes: by rank, "
            f"{passes.tolist()}; a rank leaves out all passes before a step, or none"
        )
    everyone = cast("list[list[dict[str, object]]]", comm.all_gather_objects(_options_of(optimizer)))
    for rank, theirs in enumerate(everyone):
        for group, (first, other) in enumerate(zip(everyone[0], theirs, strict=True)):
            for name, value in first.items():
                if other.get(name) != value:
                    raise BadOption(
                        f"'{name}' of param group {group} is {value} on rank 0 and {other.get(name)} on "
                        f"rank {rank}; let all ranks have the same: a scheduler that is told a loss needs "
                        "that of all of them, scheduler.step(tutti.mean(loss))"
                    )


def _current() -> Job:
    assert _job is not None, "init() makes the job"
    return _job


def _steppers_of(model: nn.Module) -> list[Stepper]:
    init()
    steppers = [stepper for stepper in _current().steppers if stepper.replica.module is model]
    if steppers:
        return steppers
    raise BadOption("this model is not trained by tutti; give it to distribute() first")


class _Dealing:
    """A batch sampler: of rank 0's batches this rank's part of each, or every so many-th, whole."""

    def __init__(self, batches: Iterable[list[Any]], job: Job) -> None:
        self.batches, self.job = batches, job
        self.deals: list[Dealt] = []
        self.seen = 0

    def __iter__(self) -> Iterator[list[Any]]:
        comm, together = self.job.comm, self.job.pace is Pace.TOGETHER
        source = iter(self.batches) if comm.rank == 0 else iter(())
        while True:
            drawn = [list(batch) for batch in islice(source, self._ahead())]
            shared = cast("list[list[Any]]", comm.broadcast_object(drawn))
            if not shared:
                return
            for batch in shared:
                mine = self.seen % comm.size == comm.rank
                self.seen += 1
                if together or mine:
                    own = batch[cut(len(batch), comm.size)[comm.rank]] if together else batch
                    self.deals.append(Dealt(len(own), len(batch)))
                    yield own or batch[:1]

    def _ahead(self) -> int | None:
        """How many batches to draw at a time; None: all, so that nobody waits for rank 0 in the epoch."""
        if self.job.pace is Pace.FREE and isinstance(self.batches, Sized):
            return None
        return AHEAD if self.job.pace is Pace.TOGETHER else AHEAD * self.job.comm.size


def _from_loader(loader: DataLoader[Any], job: Job) -> Iterator[Any]:
    dealing = _Dealing(cast("Iterable[list[Any]]", loader.batch_sampler), job)
    own = DataLoader(
        loader.dataset,
        batch_sampler=dealing,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    for batch in own:
        yield _deal(batch, dealing.deals.pop(0))
    if job.pace is not Pace.TOGETHER:
        _complete_round(dealing.seen, job)


def _whole_batches(batches: Iterable[Any], job: Job) -> Iterator[Any]:
    """Every so many-th batch."""
    seen = 0
    for batch in batches:
        if seen % job.comm.size == job.comm.rank:
            length = _length(batch)
            yield _deal(batch, Dealt(length, length))
        seen += 1
    _complete_round(seen, job)


def _complete_round(batches: int, job: Job) -> None:
    """Skip the last round of an epoch where this rank has no batch in it: all make as many steps or skips."""
    left = batches % job.comm.size
    if left and job.comm.rank >= left and torch.is_grad_enabled():
        for stepper in job.steppers:
            stepper.skip()


def _own_part(batch: Any, job: Job) -> Any:
    comm, length = job.comm, _length(batch)
    if comm.size == 1:
        return _deal(batch, Dealt(length, length))
    _check_lengths(batch, length)
    part = cut(length, comm.size)[comm.rank]
    deal = Dealt(part.stop - part.start, length)
    return _deal(_map(batch, lambda x: (x[part] if deal.own else x[:1]) if x.dim() else x), deal)


def _check_lengths(batch: Any, length: int) -> None:
    for tensor in _tensors(batch):
        if tensor.dim() and len(tensor) != length:
            raise BadOption(
                f"a batch has tensors of {length} and of {len(tensor)} along the first dimension; shard() "
                "cuts batches whose tensors all have the samples along it"
            )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, dict)):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(value)


def _deal(batch: Any, deal: Dealt) -> Any:
    """Note the counts for the next `step()`; outside training an empty part is really empty."""
    job = _current()
    job.deal(deal)
    if deal.own == 0 and not torch.is_grad_enabled():
        return _map(batch, lambda x: x[:0] if x.dim() else x)
    if job.comm.size > 1:
        for tensor in _tensors(batch):
            job.deals[tensor] = deal
    return batch


def _map(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if batch is None or isinstance(batch, (int, float, str, bytes)):
        return batch
    if isinstance(batch, dict):
        return {key: _map(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(value, function) for value in batch)
    raise BadOption(
        f"shard() can cut tensors, and tuples, lists and dicts of them, not {type(batch).__name__}"
    )


def _length(batch: Any) -> int:
    for tensor in _tensors(batch):
        if tensor.dim():
            return len(tensor)
    raise BadOption(
        f"shard() needs batches with samples along the first dimension, not {type(batch).__name__}"
    )
