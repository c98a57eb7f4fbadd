"""The memory that a rank needs under a layout, found by a dry run on tensors without contents.

Weights, gradients and the optimizer's state follow from the parameters that a rank holds. What forward and
backward need besides is the peak of a step on torch's meta device, where every operation has shapes but no
numbers: each tensor counts from where an operation makes it to where nothing refers to it any more. Ranks of
a pipeline are taken through the actions of its schedule.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadModel, BadOption
from tutti.model_parallel.base import Workload
from tutti.model_parallel.fsdp import units
from tutti.model_parallel.fx_blocks import blocks_of
from tutti.model_parallel.layout import SCHEDULES, Layout, Pipeline
from tutti.model_parallel.layout import Tensor as TensorOptions
from tutti.model_parallel.partition import balance, boundaries, measure
from tutti.model_parallel.pipeline import Stage, enough
from tutti.model_parallel.schedules import PLACES_KEPT, check_microbatches, owners
from tutti.model_parallel.tensor import split
from tutti.records.pipeline import BACKWARD, FORWARD, INPUTS, WEIGHTS

_KINDS: Final = {
    "FORWARD": FORWARD,
    "BACKWARD_INPUT": INPUTS,
    "BACKWARD_WEIGHT": WEIGHTS,
    "FULL_BACKWARD": BACKWARD,
}


@dataclass(frozen=True)
class Action:
    """One piece of work: a microbatch in a stage. `kind` is one of `tutti.records.pipeline.KINDS`."""

    stage: int
    kind: str
    microbatch: int


def order(schedule: str, ranks: int, microbatches: int, rank: int) -> list[Action]:
    """The actions of one rank for a batch, in order."""
    every = range(microbatches)
    if schedule == "gpipe":
        return [Action(rank, kind, at) for kind in (FORWARD, BACKWARD) for at in every]
    if schedule == "1f1b":
        ahead = min(microbatches, ranks - rank)
        found = [Action(rank, FORWARD, at) for at in range(ahead)]
        for at in every:
            found.append(Action(rank, BACKWARD, at))
            if at + ahead < microbatches:
                found.append(Action(rank, FORWARD, at + ahead))
        return found
    return _of_torch(schedule, ranks, microbatches, rank)


def _of_torch(schedule: str, ranks: int, microbatches: int, rank: int) -> list[Action]:
    """The actions of torch's schedule, which needs only its numbers for that."""
    kinds: dict[str, Any] = {
        "interleaved": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }
    rounds, stages = max(1, microbatches // ranks), SCHEDULES[schedule]
    numbers = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * stages,
        n_local_stages=stages,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    found = kinds[schedule]._calculate_single_rank_operations(numbers, rank)
    return [
        Action(one.stage_index, _KINDS[one.computation_type.name], one.microbatch_index)
        for one in found
        if one is not None and one.computation_type.name in _KINDS
    ]


PROBE: Final = 64
"""Rows and columns of the parameter that shows how much state an optimizer keeps."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs.

    Attributes:
        weights: parameters and buffers; those that the ranks of a host share count in equal parts.
        gradients: of the parameters.
        state: of the optimizer.
        activations: what a step needs besides, at its peak: kept for backward, on the way, and the samples.
    """

    weights: int
    gradients: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.state + self.activations


class PeakMemory(TorchDispatchMode):
    """A mode that adds up the bytes of all tensors that operations make.

    Attributes:
        peak: the most that there was at one time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._live = 0
        self._alive: set[int] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the memory that its results have and its arguments have not."""
        given = {
            x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        found = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(found):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._count(storage)
        if func is torch.ops.aten.convolution_backward.default:
            self.peak = max(self.peak, self._live + _rearranged(*args[:2]))
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = storage._cdata, storage.nbytes()
        self._alive.add(place)
        self._live += nbytes
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._freed, place, nbytes)

    def _freed(self, place: int, nbytes: int) -> None:
        self._alive.discard(place)
        self._live -= nbytes


def _rearranged(gradient: Tensor, inputs: Tensor) -> int:
    """The bytes that the backward pass of a convolution copies into the memory layouts that oneDNN has."""
    return sum(x.nbytes for x in (gradient, inputs) if not x.is_contiguous(memory_format=torch.channels_last))


def state_per_byte(make: Callable[[nn.Module], Optimizer]) -> float:
    """The bytes of state that an optimizer keeps for each byte of parameters.

    Args:
        make: the optimizer over the parameters of a module.
    """
    module = nn.Linear(PROBE, PROBE, bias=False)
    probe = module.weight
    probe.grad = torch.zeros_like(probe)
    optimizer = make(module)
    optimizer.step()
    kept = pytree.tree_leaves(list(optimizer.state.values()))
    return sum(x.nbytes for x in kept if isinstance(x, Tensor) and x.numel() > 1) / probe.nbytes


def needs(
    layout: Layout | None, ranks: int, module: nn.Module, workload: Workload, state: float
) -> MemoryNeed:
    """The need of the rank that needs the most.

    Args:
        layout: who holds what; None: each rank the whole model, and its share of a batch.
        ranks: how many there are.
        module: the model; it is left as it is.
        workload: the samples and the loss.
        state: what `state_per_byte` gave.

    Raises:
        BadModel, BadOption: the model cannot be divided like that.
    """
    if layout is None:
        return _whole(ranks, module, workload, state)
    way = {"tensor": _tensor, "pipeline": _pipeline, "sharded": _sharded}[layout.way]
    try:
        return way(layout, module, workload, state)
    except (RuntimeError, NotImplementedError) as error:
        raise BadModel(
            f"the model cannot be run without contents ({error}); train it for some steps and look instead"
        ) from error


def _whole(ranks: int, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Data parallelism on one host: weights once for all, gradients for each, state in slices."""
    model = _meta(module)
    weights, gradients = _held(model)
    peak = _step(model, workload, -(-workload.batch_size // ranks))
    return MemoryNeed(weights // ranks, gradients, int(state * gradients) // ranks, peak)


def _tensor(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    if isinstance(layout.options, TensorOptions) and layout.options.plan is not None:
        raise BadOption("what a plan does to the memory is not known before it is carried out")
    model = _meta(module)
    split(model, _absent(layout.team))
    weights, gradients = _held(model)
    peak = _step(model, workload, -(-workload.batch_size // layout.data))
    return _shared(layout, weights, gradients, state, peak)


def _sharded(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    model = _meta(module)
    weights, gradients = (part // layout.team for part in _held(model))
    whole = [sum(p.nbytes for p in unit.parameters(recurse=False)) for unit in units(model)]
    # In the backward pass a layer's gradients are there as a whole, its weights, and those of the next one.
    # The step below, of a model that has all weights, has only the gradients.
    most = max(2 * own + following for own, following in pairwise([*whole, 0]))
    peak = _step(model, workload, -(-workload.batch_size // layout.ranks)) + most - max(whole)
    return MemoryNeed(weights, gradients, int(state * gradients), peak)


def _pipeline(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    assert isinstance(layout.options, Pipeline)
    options, batch = layout.options, workload.batch_size // layout.data
    microbatches = check_microbatches(options, layout.team, batch)
    inputs = workload.batch(-(-batch // microbatches))[0]
    blocks = enough(blocks_of(module, inputs, workload.arithmetic), layout)
    placed = owners(options.schedule, layout.team)
    cuts = balance(measure(blocks, inputs, workload.arithmetic), len(placed))
    edges = boundaries(blocks, inputs, workload.arithmetic)
    shapes = [edges[part.start] for part in cuts] + [edges[-1]]
    found = []
    for rank in range(layout.team):
        own = {
            number: cast("Stage", _meta(Stage(blocks[cuts[number]], workload.arithmetic)))
            for number, owner in enumerate(placed)
            if owner == rank
        }
        weights, gradients = _held(nn.ModuleList(own.values()))
        actions = order(options.schedule, layout.team, microbatches, rank)
        peak = _pieces(own, actions, shapes, workload)
        found.append(_shared(layout, weights, gradients, state, peak))
    return max(found, key=lambda need: need.total)


def _pieces(
    own: Mapping[int, nn.Module], actions: Sequence[Action], shapes: Sequence[Tensor], workload: Workload
) -> int:
    """The peak of a rank's work on one batch."""
    last, size = len(shapes) - 2, len(shapes[0])
    microbatches = 1 + max(action.microbatch for action in actions)
    _, targets = workload.batch(size)
    targets = targets.to("meta")
    fixed = microbatches * shapes[0].nbytes * (0 in own)
    if PLACES_KEPT:
        places = [number for number in own if number] + [number + 1 for number in own if number < last]
        fixed += microbatches * sum(shapes[place].nbytes for place in places)
    flying: dict[tuple[int, int], Tensor] = {}
    with PeakMemory() as ledger:
        for action in actions:
            key = action.stage, action.microbatch
            if action.kind == FORWARD:
                flying[key] = own[action.stage](_received(shapes[action.stage], action.stage > 0))
                if action.stage == last:
                    flying[key] = workload.loss(flying[key], targets)
            elif action.kind != INPUTS:
                gradient = None if action.stage == last else _received(shapes[action.stage + 1], True)
                torch.autograd.backward(flying.pop(key), gradient)
                del gradient
    return int(ledger.peak + fixed)


def _received(shape: Tensor, from_a_rank: bool) -> Tensor:
    """A tensor that another rank sends, or the samples; what has a place of its own is not counted here."""
    if PLACES_KEPT or not from_a_rank:
        return shape.detach().requires_grad_(from_a_rank)
    return torch.empty_like(shape, requires_grad=from_a_rank)


def _shared(layout: Layout, weights: int, gradients: int, state: float, peak: int) -> MemoryNeed:
    """The need of a rank of teams on one host: holders of the same portion share one copy of its weights."""
    return MemoryNeed(weights // layout.data, gradients, int(state * gradients) // layout.data, peak)


def _meta(module: nn.Module) -> nn.Module:
    """The module without contents, ready to be trained: its gradients have their places."""
    model = copy.deepcopy(module).to("meta").train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def _held(model: nn.Module) -> tuple[int, int]:
    """The bytes of parameters and buffers, and of gradients."""
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    return weights, sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _step(model: nn.Module, workload: Workload, count: int) -> int:
    """The peak of forward and backward of `count` samples, and the samples."""
    inputs, targets = (x.to("meta") for x in workload.batch(count))
    with PeakMemory() as ledger:
        torch.autograd.backward(workload.loss(workload.arithmetic.forward(model, inputs), targets))
    return int(ledger.peak + inputs.nbytes + targets.nbytes)


def _absent(size: int) -> Communicator:
    """Rank 0 of a team that does not exist: on the meta device nothing is exchanged."""
    return cast("Communicator", SimpleNamespace(rank=0, size=size))
