"""Fully sharded data parallelism: the ranks of a team hold slices of every parameter, and gather it for use.

    rank 0   gather 1, forward 1, drop 1 │ gather 2, forward 2, drop 2 │ ... │ gather 2, backward 2 │ ...
    rank 1   gather 1, forward 1, drop 1 │ gather 2, forward 2, drop 2 │ ... │ gather 2, backward 2 │ ...
                                                                         the sum of gradients, in slices

Every rank has its own samples, as with `sync`, and one slice of weights, gradients and optimizer state. A
layer's weights are gathered for its forward and its backward pass, and then dropped: PyTorch's FSDP2.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.3;
Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from contextlib import nullcontext
from itertools import pairwise
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data.batches import Batch
from tutti.model_parallel.base import LayoutRanks, Of, TeamPortion, Workload, taken, values_of
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, held, on_meta, peak_of_step
from tutti.optim.clipping import clip_gradients
from tutti.optim.sliced_optimizer import is_elementwise
from tutti.optim.state import held_by
from tutti.replica import Gradients, Replica, local
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Strategy, Worker
from tutti.training.evaluation import Objective
from tutti.training.run_parts import Computed


class ShardedPortion(TeamPortion):
    """One rank's slices of a model's parameters."""

    def __init__(self, module: nn.Module, ranks: LayoutRanks, group: TeamMesh, workload: Workload) -> None:
        super().__init__(module, ranks, lambda _: True, group)
        self.peers, self._workload = ranks.every, workload
        self._objective = Objective(workload.loss, arithmetic=workload.arithmetic)
        for unit in units(module):
            # The module itself drops what it has gathered, too: states are saved between two passes.
            fully_shard(unit, mesh=group.team, reshard_after_forward=True)
        self.compute = self._compute

    @override
    def place(self, strategy: Strategy) -> Replica:
        replica = Replica(self.module)
        replica.gradients.share = self._share
        replica.gradients.keep_apart(self.module.parameters())
        return replica

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        return ShardedWorker(self.module, self.data, optimizer, clip, replica.gradients)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        whole: dict[Tensor, Tensor] = {}
        for value in self.module.state_dict(keep_vars=True).values():
            if isinstance(value, DTensor) and value not in whole:
                whole[value] = cast("DTensor", of(value)).full_tensor()
        return taken(self.module, lambda tensor: whole[tensor] if tensor in whole else of(tensor))

    def _compute(self, batch: Batch) -> Computed:
        """Run forward and backward; a rank without samples computes one that does not count, as all must."""
        arithmetic = self._objective.arithmetic
        inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
        count = len(targets)
        if not count:
            inputs, targets = self._workload.batch(1)
        began = perf_counter()
        weights = batch.weights if count else None
        computed = self._objective.compute(self.module, inputs, targets, weights)
        seconds = {"forward": perf_counter() - began}
        # FSDP makes the mean of a team's gradients; what is wanted is their sum.
        torch.autograd.backward(computed.loss, computed.loss.new_tensor(batch.share * self.ranks.team.size))
        outputs, targets = computed.outputs.detach()[:count], targets[:count]
        if not count:
            return Computed(0.0, outputs, targets, 0.0, seconds)
        return Computed(computed.reported.item(), outputs, targets, computed.weight, seconds)


class ShardedWorker(Worker):
    """The worker of a rank with a slice of every parameter."""

    def __init__(
        self, module: nn.Module, data: Communicator, optimizer: Optimizer, clip: Clip, gradients: Gradients
    ) -> None:
        super().__init__()
        self._data, self._optimizer, self._clip, self._gradients = data, optimizer, clip, gradients
        self._slices = OwnSlices(optimizer) if is_elementwise(optimizer) else None
        moved = self._slices.moved if self._slices else {}
        self._names = {moved.get(p, p): name for name, p in module.named_parameters()}
        self._divide_state()

    @override
    def step(self) -> None:
        began = self._data.clock()
        sent = self._add_up() if self._data.size > 1 else 0
        self.traffic.add(sent, self._data.clock() - began, staleness=0)
        with self.updating:
            clip_gradients(self._gradients, self._clip.norm, self._clip.value)
            with self._slices or nullcontext():
                self._optimizer.step()
        self._gradients.zero()

    @override
    def state(self) -> State:
        """Return the optimizer's state for this rank's slices of the parameters."""
        return State(joint=held_by(self._optimizer, self._names))

    @override
    def load_state(self, saved: Saved) -> None:
        """Do nothing: the optimizer has its state."""

    @torch.no_grad()
    def _divide_state(self) -> None:
        """Divide this rank's part of an optimizer's state like the parameters."""
        for parameter in self._names:
            own, kept = local(parameter.detach()), self._optimizer.state.get(parameter, {})
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    kept[key] = part = value.clone()
                    if isinstance(parameter, DTensor) and value.shape == own.shape:
                        mesh, places = parameter.device_mesh, parameter.placements
                        shape, stride = parameter.shape, parameter.stride()
                        kept[key] = DTensor.from_local(part, mesh, places, shape=shape, stride=stride)

    @override
    def finish(self) -> None:
        """Do nothing: every step leaves the final weights in place."""

    @torch.no_grad()
    def _add_up(self) -> int:
        """Sum the gradients over the teams; return the bytes sent."""
        sent = 0
        for gradient in self._gradients.vectors():
            total = gradient.contiguous().view(-1)
            self._data.all_reduce(total)
            gradient.copy_(total.view(gradient.shape))
            sent += total.nbytes
        return sent


class OwnSlices:
    """A rank's slices of an elementwise optimizer's parameters, which it moves instead inside a `with` block.

    For each operation on DTensors torch computes the division of its result, which takes longer than the
    operation on a small tensor. The optimizer keeps its state for the slices, `moved`, by the model's
    parameter.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        self.moved: dict[Tensor, nn.Parameter] = {
            parameter: nn.Parameter(local(parameter.detach()), parameter.requires_grad)
            for _, parameters in self._groups
            for parameter in parameters
            if isinstance(parameter, DTensor)
        }
        state: MutableMapping[Any, Any] = optimizer.state
        for parameter, part in self.moved.items():
            if parameter in state:
                state[part] = state.pop(parameter)

    @torch.no_grad()
    def __enter__(self) -> None:
        """Make the optimizer move the slices by the gradients of the parameters."""
        for parameter, part in self.moved.items():
            # FSDP puts a part into other memory when the model is called for the first time.
            part.data = local(parameter)
            part.grad = None if parameter.grad is None else local(parameter.grad)
        for group, parameters in self._groups:
            group["params"] = [self.moved.get(parameter, parameter) for parameter in parameters]

    def __exit__(self, *_: object) -> None:
        for group, parameters in self._groups:
            group["params"] = parameters
        for part in self.moved.values():
            part.grad = None


def units(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that are gathered one by one; the last one has all shared parameters."""
    owners = Counter(p for layer in module.modules() for p in layer.parameters(recurse=False))
    layers = [layer for layer in module.modules() if layer is not module]
    alone = [
        layer
        for layer in layers
        if (own := list(layer.parameters(recurse=False))) and all(owners[p] == 1 for p in own)
    ]
    # A layer inside of another goes first: what is taken is not taken again.
    return [*reversed(alone), module]


def portion(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> ShardedPortion:
    """Make this rank's slices of a model (collective)."""
    ranks = LayoutRanks.of(comm, layout.team)
    return ShardedPortion(module, ranks, TeamMesh(comm, layout.team), workload)


def need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Return the need of a rank."""
    model = on_meta(module)
    weights, gradients = (nbytes // layout.team for nbytes in held(model))
    whole = [sum(p.nbytes for p in unit.parameters(recurse=False)) for unit in units(model)]
    # In the backward pass a layer's gradients are there as a whole, its weights, and those of the next one.
    # The step below, of a model that has all weights, has only the gradients.
    most = max(2 * own + following for own, following in pairwise([*whole, 0]))
    peak = peak_of_step(model, workload, -(-workload.batch_size // layout.ranks)) + most - max(whole)
    return MemoryNeed(weights, gradients, int(state * gradients), peak)
