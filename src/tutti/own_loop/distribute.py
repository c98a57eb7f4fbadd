"""The functions for a loop of the user's own: `init`, `distribute`, `shard` and the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import wraps
from numbers import Real
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from tutti import strategies
from tutti.comm.base import Communicator
from tutti.errors import BadModel, BadOption, refuse_other
from tutti.launch.launcher import started_by
from tutti.launch.world import join, warn_of_crowding
from tutti.optim.state import in_form_of, options_of
from tutti.own_loop.checkpoints import Checkpoints, check_objects
from tutti.own_loop.loop import ModuleHook, Number, OpenIteration, OwnLoop, Stepper, like, plain
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.places import generators_of
from tutti.own_loop.shard import Dealt, deals_in_rounds, emptied, from_batches, from_loader
from tutti.own_loop.steppers import JointStepper, WorkerStepper
from tutti.parameter_server.base import Centre
from tutti.run.arguments import as_arguments
from tutti.strategies.base import Clip, Home, Pace, Strategy
from tutti.training.evaluation import average_buffers
from tutti.training.preflight import max_norm_of

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_loop: OwnLoop | None = None


def init() -> Communicator:
    """Join the ranks that this program was started with; call it once, before anything else of tutti.

    `tutti run -n 4 PROGRAM`, `mpirun -n 4 python PROGRAM` and `srun -n 4 python PROGRAM` start four ranks;
    a plain `python PROGRAM` is a world of one.

    Returns:
        The communicator of all ranks; `.rank` and `.size` say who this process is.
    """
    return _current().comm


def distribute(
    model: Model,
    optimizer: AnyOptimizer,
    strategy: Strategy | str | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    reduction: str | None = None,
) -> tuple[Model, AnyOptimizer]:
    """Train `model` on all ranks; nothing else in the program changes if its loss is a mean over samples.

    Every rank goes on from the weights of rank 0, and from the state and options of its optimizer. With the
    default strategy `parameter.grad` is the gradient of the whole batch on every rank when `backward()`
    returns, and `optimizer.step()` moves the weights of all ranks by it: the program computes what it
    computes with plain torch on one process (docs/own-loop.md). With most others, gradients are the rank's
    own, and `optimizer.step()` is the strategy's step.

    Where the strategy gives every worker weights of its own, evaluate inside `with settled(model)`, and call
    `finish(model)` after the last step.

    Args:
        model: its parameters are re-pointed into flat vectors, values kept.
        optimizer: any torch optimizer over the model's parameters. Schedulers attached to it keep working.
        strategy: how to train, or its name; `Sync()` by default.
        clip_norm: largest 2-norm of the gradient of the whole model.
        clip_value: largest absolute value of an element of the gradient.
        reduction: what the loss is over the samples of a batch that `shard` dealt: their "mean" or their
            "sum". By default it is their mean: `backward()` refuses a loss that is seen to be a sum.

    Returns:
        The same two objects.

    Raises:
        BadOption: what is given is no model, optimizer or strategy; or the strategy cannot use this many
            ranks, or another model of this program is trained at another pace, or this one already is.
        UnknownName: there is no strategy of this name.
    """
    chosen = strategies.named(strategy)() if isinstance(strategy, str) else strategy or strategies.Sync()
    refuse_other(chosen, Strategy, "strategy", "tutti.Sync()")
    refuse_other(model, nn.Module, "model", "nn.Linear(2, 1)")
    refuse_other(optimizer, Optimizer, "optimizer", "torch.optim.Adam(model.parameters())")
    if reduction not in (None, "mean", "sum"):
        raise BadOption(f"reduction is {reduction!r}; give 'mean' or 'sum', whichever the loss is")
    if chosen.passes > 1:
        raise BadOption(
            f"strategy '{chosen.name}' is given every={chosen.passes}, and in a loop of your own you decide "
            f"when to step; leave that out, and call backward() {chosen.passes} times for each step()"
        )
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(one) in known for group in optimizer.param_groups for one in group["params"]):
        raise BadOption("the optimizer has no parameter of this model; make it from model.parameters()")
    loop = _current()
    loop.exchange.meetings.come(Purpose.DISTRIBUTE)
    _check_ranks(chosen, loop.comm)
    if loop.steppers and chosen.pace is not loop.pace:
        raise BadOption(
            f"strategy '{chosen.name}' ({chosen.pace.value}) cannot train beside that of the first model "
            f"({loop.pace.value}): they need other batches; give both the same strategy"
        )
    if any(isinstance(one, JointStepper) and one.is_of(model, optimizer) for one in loop.steppers):
        return model, optimizer
    _share_state(optimizer, loop.comm)
    clip = Clip(clip_norm, clip_value)
    with as_arguments(of_loop=True):
        make = _joint if chosen.joins_gradients else _apart
        stepper = make(model, optimizer, chosen, clip, reduction == "sum", loop)
    torch.autograd.backward = _backward
    loop.judges &= reduction is None
    loop.steppers.append(stepper)
    return model, optimizer


@torch.no_grad()
def _share_state(optimizer: Optimizer, comm: Communicator) -> None:
    """Give every rank's optimizer the state and the options of rank 0's (collective)."""
    state = cast("dict[Any, Any]", optimizer.state)
    counts = [len(group["params"]) for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = {number: state[p] for number, p in enumerate(parameters) if p in state}
    others = {key: value for key, value in state.items() if not isinstance(key, nn.Parameter)}
    own = (counts, by_number, others, options_of(optimizer))
    first_counts, by_number, others, options = cast("tuple[Any, ...]", comm.broadcast_object(own))
    if counts != first_counts:
        raise BadOption(
            f"the param groups of the optimizer have {counts} parameters on rank {comm.rank} and "
            f"{first_counts} on rank 0; make the same optimizer on every rank"
        )
    if comm.rank == 0:
        return
    state.clear()
    state.update({parameters[number]: value for number, value in by_number.items()} | others)
    for group, first in zip(optimizer.param_groups, options, strict=True):
        group.update({name: in_form_of(group.get(name), value) for name, value in first.items()})


_torchs_backward = torch.autograd.backward


@wraps(_torchs_backward)
def _backward(tensors: Any, *arguments: Any, **named: Any) -> None:
    """Torch's own, which `Tensor.backward` calls; only here can the graph of a loss be looked at."""
    outermost = torch._C._current_graph_task_id() == -1
    if _loop is None or not outermost:
        _torchs_backward(tensors, *arguments, **named)
        return
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    _loop.begin_pass([one.grad_fn for one in roots if getattr(one, "grad_fn", None) is not None])
    try:
        _torchs_backward(tensors, *arguments, **named)
    finally:
        _loop.exchange.end()


def _check_ranks(strategy: Strategy, comm: Communicator) -> None:
    if Centre in strategy.needs:
        raise BadOption(
            f"strategy '{strategy.name}' has a parameter centre, and a loop of one's own has none; use "
            "tutti.train(), or a strategy without a centre, such as tutti.Sync() or tutti.EASGDSync()"
        )
    with as_arguments(of_loop=True):
        strategy.check(comm.size, comm.hosts)


def _apart(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    clip: Clip,
    sums: bool,
    loop: OwnLoop,
) -> WorkerStepper:
    _refuse_known(model, loop)
    comm, own = loop.comm, [(parameter, parameter.grad) for parameter in model.parameters()]
    replica = strategies.place(model, comm, strategy.home)
    replica.in_own_loop = True
    worker = strategy.worker(replica, comm, optimizer, clip)
    for parameter, gradient in own:
        parameter.grad = gradient
    stepper = WorkerStepper(replica, optimizer, strategy, sums, loop, clip, worker)
    _watch_loading(model, lambda: stepper.worker.adopt())
    return stepper


def _joint(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    clip: Clip,
    sums: bool,
    loop: OwnLoop,
) -> JointStepper:
    comm = loop.comm
    known = [one for one in loop.steppers if isinstance(one, JointStepper) and one.replica.module is model]
    if known:
        replica, copies, gradients = known[0].replica, known[0].copies, known[0].gradients
        joint = known[0].joint
    else:
        _refuse_known(model, loop)
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
            loop.exchange.add(joint, sums)
            loop.exchange.weigh(*loop.counts)
    apart = any(own is not flat.grads for own, flat in zip(gradients, replica.flats, strict=True))
    if apart and isinstance(optimizer, torch.optim.SparseAdam):
        raise BadOption(
            f"SparseAdam takes sparse gradients only, and strategy '{strategy.name}' with the options "
            f"{strategy.options()} makes them dense; give Sync() without options, or another optimizer"
        )
    return JointStepper(replica, optimizer, strategy, sums, loop, clip, copies, gradients, joint)


def _watch_loading(model: nn.Module, adopt: Callable[[], None]) -> None:
    """Call `adopt` when weights are loaded into the model, or into a part of it."""
    for part in model.modules():
        part.register_load_state_dict_post_hook(ModuleHook(lambda *_: adopt()))  # type: ignore[no-untyped-call]


def _refuse_lookups_that_write(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if (norm := max_norm_of(layer)) is not None:
            raise BadOption(
                f"the embedding '{name}' has max_norm={norm}: it rewrites the rows that a rank "
                "looks up, and the other ranks do not; scale its weights in the loop, after each step"
            )


def _refuse_known(model: nn.Module, loop: OwnLoop) -> None:
    known = {id(p) for stepper in loop.steppers for p in stepper.replica.module.parameters()}
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
    with _current().exchange.meetings.explaining(Purpose.SETTLE):
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
    with _current().exchange.meetings.explaining(Purpose.FINISH):
        average_buffers(steppers[0].replica, init())


def checkpoints(folder: str | Path, keep: int = 3, **objects: Any) -> Checkpoints:
    """Keep checkpoints of this loop in a folder (collective): `run.save(step)` and `run.restore()`.

    A checkpoint has all models and optimizers that `distribute` was given before, random numbers, and how far
    loops over `shard` have come.

    Args:
        folder: where; one for each loop.
        keep: how many of the last ones are kept.
        **objects: what else has a state: schedulers, a GradScaler, averaged models, anything with
            `state_dict()` and `load_state_dict()`; and generators of random numbers (`torch.Generator`).

    Raises:
        BadOption: `distribute` was not called before, or an object cannot be kept.
        BadRunFolder: the folder cannot be written.
    """
    loop = _current()
    if not loop.steppers:
        raise BadOption("tutti.checkpoints() saves what distribute() was given; call that before")
    if not isinstance(keep, int) or keep < 1:
        raise BadOption(f"keep is {keep!r}; give a whole number from 1")
    check_objects(loop, objects)
    loop.exchange.meetings.come(Purpose.KEEP)
    with loop.exchange.meetings.explaining(Purpose.KEEP):
        return Checkpoints(loop, Path(folder).absolute(), keep, objects)


def mean(value: Number, samples: int | None = None) -> Number:
    """The mean of a figure over the ranks, each weighted by its samples (collective).

    A learning-rate scheduler that is told a loss needs the same on all ranks:
    `scheduler.step(tutti.mean(loss))`.

    Args:
        value: this rank's, the mean over its own samples: a number, or a tensor of one element. Without
            samples it does not count.
        samples: over how many this rank has taken it; by default, how many `shard` dealt to it last: those of
            this batch or, after the loop, of all its batches.

    Returns:
        The same on all ranks, of the type of `value`, or of the default type for a tensor of integers. NaN if
        no rank has a sample.

    Raises:
        BadOption: `value` is no single number, or `samples` no number of samples.
    """
    loop = _current()
    count = loop.samples if samples is None else samples
    if not isinstance(count, int) or count < 0:
        raise BadOption(f"mean() is given {count!r} samples; give a whole number from 0")
    _check_figure(value, "mean")
    sums = loop.add_up(Purpose.MEAN, plain(value) * count if count else 0.0, float(count))
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return like(value, (sums[0] / sums[1]).item(), torch.get_default_dtype() if whole else None)


def total(value: Number) -> Number:
    """The sum of a figure over the ranks (collective): of what a loss is divided by, if not by its samples.

    Args:
        value: this rank's, for the batch that `shard` dealt last or, after the loop, for all its batches: a
            number, or a tensor of one element. Where it was dealt no sample of that, it does not count.

    Returns:
        The same on all ranks, of the type of `value`; an integer for truth values.

    Raises:
        BadOption: `value` is no single number.
    """
    _check_figure(value, "total")
    loop = _current()
    sums = loop.add_up(Purpose.TOTAL, plain(value) if loop.samples else 0.0)
    flag = isinstance(value, torch.Tensor) and value.dtype == torch.bool
    return like(value, sums[0].item(), torch.int64 if flag else None)


def _check_figure(value: object, function: str) -> None:
    single = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)
    if not single:
        raise BadOption(
            f"{function}() takes a number, or a tensor of one element, which this rank's figure is not"
        )


class shard:
    """A rank's own samples; together the ranks see each sample once.

    Where the workers make each update together, and where nothing is distributed, that is this rank's part of
    every batch. Where each worker makes its own updates, whole batches are dealt to the ranks in turn; in
    training, the last ones of an epoch are left out if they are too few for all ranks.

    Iterating yields batches of the same structure. Where a batch has fewer samples than there are ranks, a
    rank without any gets an empty batch under `torch.no_grad()`, and else one sample whose gradient does not
    count.

    Args:
        batches: a `DataLoader` (only this rank's samples are read; the order is that of rank 0's sampler), or
            any iterable, also a loader of an `IterableDataset` or of a class with an `__iter__` of its own,
            that yields the same batches on every rank: tensors or arrays, or tuples, lists, dicts and
            dataclasses of them. A list or tuple of as many numbers or words as there are samples has one for
            each of them.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        given: object = batches
        if isinstance(given, shard):
            raise BadOption(
                "shard() was given what shard() has returned, and would deal parts of this rank's part; give "
                "it the loader itself"
            )
        if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
            raise BadOption(
                f"shard() takes a DataLoader, or another iterable of batches, but was given {batches!r}"
            )
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        loop = _current()
        loads = (
            isinstance(self.batches, DataLoader)
            # A class of the program's may do more than load: change the batches, or never end.
            and type(self.batches).__iter__ is DataLoader.__iter__
            and self.batches.batch_sampler is not None
            and not isinstance(self.batches.dataset, IterableDataset)
        )
        mine = OpenIteration(loop.counts)
        if loop.keeps_places and torch.is_grad_enabled():
            mine.start = loop.start_of(self.batches)
            _warn_of_unkept_generators(self.batches, loop)
        deal = from_loader if loads else from_batches
        return _in_loop(deal(cast("DataLoader[Any]", self.batches), loop, mine.start), mine, loop)

    def __len__(self) -> int:
        loop, batches = _current(), len(cast("Sized", self.batches))
        if deals_in_rounds(loop):
            return batches // loop.comm.size
        return batches if loop.pace is Pace.TOGETHER else len(range(loop.comm.rank, batches, loop.comm.size))


def _in_loop(dealt: Iterator[Dealt], mine: OpenIteration, loop: OwnLoop) -> Iterator[Any]:
    """Yield the batches that are dealt; the iteration is under way from the first one on."""
    loop.exchange.meetings.iterations += torch.is_grad_enabled()
    loop.open.append(mine)
    thread = get_ident()
    loop.exchange.meetings.dealing.append(thread)
    try:
        for batch, counts in dealt:
            loop.begin_batch(mine, counts)
            # In training the one sample is there for backward(), and weighs nothing.
            yield batch if counts.own or torch.is_grad_enabled() else emptied(batch)
        if not mine.dealt and deals_in_rounds(loop) and not (mine.start and mine.start.first):
            raise BadOption(
                f"shard() was given fewer batches than the {loop.comm.size} ranks, each of which trains on "
                "batches of its own with this strategy; give smaller batches, or use fewer ranks"
            )
    finally:
        loop.exchange.meetings.dealing.remove(thread)
        loop.close(mine)


def _warn_of_unkept_generators(batches: object, loop: OwnLoop) -> None:
    if any(all(one is not kept for kept in loop.generators) for one in generators_of(batches)):
        warnings.warn(
            "the loader draws from a torch.Generator that checkpoints do not have: unless it is seeded for "
            "each epoch, give it to tutti.checkpoints(..., generator=generator), or a restored loop shuffles "
            "its next epochs otherwise",
            stacklevel=3,
        )


def _current() -> OwnLoop:
    """The loop of this process, which joins the others at its first use."""
    global _loop
    if _loop is None:
        comm = join()
        if started_by().given:
            warn_of_crowding(comm)
        _loop = OwnLoop(comm)
    return _loop


def _steppers_of(model: nn.Module) -> list[Stepper]:
    steppers = [stepper for stepper in _current().steppers if stepper.replica.module is model]
    if steppers:
        return steppers
    raise BadOption("this model is not trained by tutti; give it to distribute() first")
