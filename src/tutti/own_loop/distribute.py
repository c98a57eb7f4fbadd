"""The functions for a user's own loop: `init`, `distribute`, `shard` and the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from tutti import strategies
from tutti.comm.base import Communicator
from tutti.errors import BadModel, BadOption, refuse_other
from tutti.launch.world import join
from tutti.optim.state import in_form_of, options_of
from tutti.own_loop.checkpoints import Checkpoints, check_objects
from tutti.own_loop.loop import Number, like, plain
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.shard import dealt_to
from tutti.own_loop.stepper import OwnLoop, Stepper
from tutti.replica import Replica
from tutti.strategies.base import WeightPlacement
from tutti.training import evaluation
from tutti.training.batch_norm import BatchStatistics, batch_norms

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_loop: OwnLoop | None = None


def init() -> Communicator:
    """Join the ranks that this program was started with; call it once, before anything else of tutti.

    `tutti run -n 4 PROGRAM`, `mpirun -n 4 python PROGRAM` and `srun -n 4 python PROGRAM` start four ranks;
    a plain `python PROGRAM` is a world of one.

    Returns:
        The communicator of all ranks, with this process's `.rank` and their number, `.size`.
    """
    return _current().comm


def distribute(
    model: Model,
    optimizer: AnyOptimizer,
    reduction: str | None = None,
    sync_batchnorm: bool = False,
) -> tuple[Model, AnyOptimizer]:
    """Train `model` on all ranks; nothing else in the program changes if its loss is a mean over samples.

    Every rank starts from the weights of rank 0, and from the state and options of its optimizer.
    `parameter.grad` is the gradient of the whole batch on every rank when `backward()` returns, and
    `optimizer.step()` moves the weights of all ranks by it: the program computes what it computes with plain
    torch on one process (docs/own-loop.md).

    Args:
        model: its parameters are re-pointed into flat vectors, values kept.
        optimizer: any torch optimizer over the model's parameters. Schedulers attached to it keep working.
        reduction: whether the loss is the "mean" or the "sum" over the samples of a batch that `shard` dealt,
            the same for all models. By default the mean: `backward()` refuses a loss that it recognises as a
            sum.
        sync_batchnorm: let BatchNorm layers normalise by the whole batch instead of each rank's part, so that
            they, too, compute what one process computes. `torch.nn.SyncBatchNorm` always does.

    Returns:
        The same two objects.

    Raises:
        BadOption: an argument is no model or optimizer, the optimizer belongs to another model, or the
            reduction differs from the last model's.
        BadModel: the model cannot be laid out, or differs between the ranks.
    """
    refuse_other(model, nn.Module, "model", "nn.Linear(2, 1)")
    refuse_other(optimizer, Optimizer, "optimizer", "torch.optim.Adam(model.parameters())")
    loop = _current()
    if reduction not in (None, "mean", "sum") or (loop.steppers and reduction != loop.reduction):
        raise BadOption(
            f"reduction is {repr(reduction).splitlines()[0]}; give 'mean' or 'sum', as the loss is, and the "
            "same for all models; call distribute again for a second optimizer"
        )
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(one) in known for group in optimizer.param_groups for one in group["params"]):
        raise BadOption("the optimizer has no parameter of this model; make it from model.parameters()")
    loop.exchange.meetings.come(Purpose.DISTRIBUTE)
    same = [one for one in loop.steppers if one.replica.module is model]
    if any(one.optimizer is optimizer for one in same):
        return model, optimizer
    _share_state(optimizer, loop.comm)
    replica, copies = (same[0].replica, same[0].copies) if same else _replica_of(model, loop)
    if loop.comm.size > 1:
        statistics = BatchStatistics(loop.comm, lambda: loop.counts.own > 0)
        statistics.normalise(
            one for one in batch_norms(model) if sync_batchnorm or isinstance(one, nn.SyncBatchNorm)
        )
    torch.autograd.backward = _backward
    loop.reduction = reduction
    loop.steppers.append(Stepper(replica, optimizer, copies, loop, len(loop.steppers)))
    return model, optimizer


@torch.no_grad()
def _share_state(optimizer: Optimizer, comm: Communicator) -> None:
    """Give every rank's optimizer rank 0's state and options (collective)."""
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
def _backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **named: Any) -> None:
    """Call torch's own `backward`, for losses weighted by the rank's share."""
    if _loop is not None and torch._C._current_graph_task_id() == -1:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        share = _loop.begin_pass([one.grad_fn for one in roots if getattr(one, "grad_fn", None) is not None])
        if share != 1:
            grads = [None] * len(roots) if grad_tensors is None else grad_tensors
            grads = [grads] if isinstance(grads, torch.Tensor) else list(grads)
            pairs = zip(roots, grads, strict=True)
            tensors, grad_tensors = roots, [_weighted(root, grad, share) for root, grad in pairs]
    _torchs_backward(tensors, grad_tensors, *arguments, **named)


def _weighted(root: Any, grad: torch.Tensor | None, share: float) -> torch.Tensor | None:
    """Return the weighted gradient of a root; torch refuses a root of several elements without one."""
    if grad is not None:
        return grad * share
    return torch.full_like(root, share) if isinstance(root, torch.Tensor) and root.numel() == 1 else None


def _replica_of(model: nn.Module, loop: OwnLoop) -> tuple[Replica, list[list[torch.Tensor]]]:
    """Lay a model out, with the weights of all ranks of this host, and exchange its gradients."""
    comm = loop.comm
    trained = {id(p) for stepper in loop.steppers for p in stepper.replica.module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in trained:
            raise BadOption(
                f"parameter '{name}' belongs to a model that distribute() was given before; give it the "
                "whole model once for each optimizer"
            )
    for name, layer in model.named_modules() if comm.size > 1 else ():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise BadOption(
                f"the embedding '{name}' has max_norm={layer.max_norm}: it rewrites the rows that a rank "
                "looks up, and the other ranks do not; scale its weights in the loop, after each step"
            )
    own = [(parameter, parameter.grad) for parameter in model.parameters()]
    # A single rank has its weights where they were, such as on a GPU.
    memory, copies = strategies.visible_memory(comm) if comm.size > 1 else (None, [])
    replica = strategies.place(model, comm, WeightPlacement.PRIVATE, memory, frozen=True)
    if comm.size > 1 and replica.scattered:
        raise BadModel(
            f"parameter '{replica.scattered[0][0]}' of the model is divided by torch.distributed; "
            "distribute() takes models that each rank has whole"
        )
    for parameter, gradient in own:
        parameter.grad = gradient
    if comm.size > 1:
        loop.exchange.add(replica)
    return replica, copies


def average_buffers(model: nn.Module) -> None:
    """Average BatchNorm's running statistics over the ranks (collective), before an evaluation or a file.

    Each rank has its own, from its parts of the batches. Other floating-point buffers are averaged as well.

    Args:
        model: a model that `distribute` returned.

    Raises:
        BadOption: `distribute` was not given this model.
    """
    loop = _current()
    replicas = [stepper.replica for stepper in loop.steppers if stepper.replica.module is model]
    if not replicas:
        raise BadOption("this model is not trained by tutti; give it to distribute() first")
    loop.exchange.meetings.come(Purpose.BUFFERS)
    evaluation.average_buffers(replicas[0], loop.comm)


def checkpoints(folder: str | Path, keep: int = 3, **objects: Any) -> Checkpoints:
    """Keep checkpoints of this loop in a folder (collective): `run.save(step)` and `run.restore()`.

    A checkpoint has all models and optimizers that `distribute` was given before, random numbers, and the
    progress of loops over `shard`.

    Args:
        folder: of the checkpoints of this loop only.
        keep: the number of latest checkpoints to keep.
        **objects: further objects with a state: schedulers, a GradScaler, averaged models, anything with
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
    return Checkpoints(loop, Path(folder).absolute(), keep, objects)


def mean(value: Number, samples: int | None = None) -> Number:
    """Return the mean of a figure over the ranks, each weighted by its samples (collective).

    A learning-rate scheduler that follows a loss needs the same loss on all ranks:
    `scheduler.step(tutti.mean(loss))`.

    Args:
        value: this rank's mean over its own samples: a number, or a tensor of one element. Without samples it
            does not count.
        samples: the number of this rank's samples; by default, those that `shard` dealt to it last: of this
            batch or, after the loop, of all its batches.

    Returns:
        The same on all ranks, of the type of `value`, or of the default type for a tensor of integers. NaN if
        no rank has a sample.

    Raises:
        BadOption: `samples` is no number of samples.
    """
    loop = _current()
    count = loop.samples if samples is None else samples
    if not isinstance(count, int) or count < 0:
        raise BadOption(f"mean() is given {count!r} samples; give a whole number from 0")
    sums = loop.add_up(Purpose.MEAN, plain(value) * count if count else 0.0, float(count))
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return like(value, (sums[0] / sums[1]).item(), torch.get_default_dtype() if whole else None)


def total(value: Number) -> Number:
    """Return the sum of a figure over the ranks (collective), such as a loss's own denominator.

    Args:
        value: this rank's, for the batch that `shard` dealt last or, after the loop, for all its batches: a
            number, or a tensor of one element. Without samples it does not count.

    Returns:
        The same on all ranks, of the type of `value`; an integer for truth values.
    """
    loop = _current()
    sums = loop.add_up(Purpose.TOTAL, plain(value) if loop.samples else 0.0)
    if isinstance(value, int):
        return cast("Number", round(sums[0].item()))
    flag = isinstance(value, torch.Tensor) and value.dtype == torch.bool
    return like(value, sums[0].item(), torch.int64 if flag else None)


class shard:
    """A rank's part of every batch; together the ranks see each sample once.

    Iterating yields batches of the same structure. Where a batch has fewer samples than there are ranks, a
    rank without any gets an empty batch under `torch.no_grad()`, and otherwise one sample whose gradient does
    not count.

    Args:
        batches: a `DataLoader` (only this rank's samples are read; in the order of rank 0's sampler), or
            any iterable, also a loader of an `IterableDataset` or of a subclass with another `__iter__`,
            that yields the same batches on every rank: tensors or arrays, or tuples, lists and dicts of them.
            A list or tuple of numbers or words, one for each sample, is cut as well.

    Raises:
        BadOption: it is not iterable, or `shard` has returned it.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        given: object = batches
        if isinstance(given, shard) or not (isinstance(given, Iterable) or hasattr(given, "__getitem__")):
            raise BadOption(
                "shard() takes a DataLoader, or another iterable of batches, not divided by shard() before, "
                f"but was given {batches!r}"
            )
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return dealt_to(_current(), self.batches)

    def __len__(self) -> int:
        return len(cast("Sized", self.batches))


def _current() -> OwnLoop:
    """Return the loop of this process, which joins the others at its first use."""
    global _loop
    if _loop is None:
        _loop = OwnLoop(join())
    return _loop
