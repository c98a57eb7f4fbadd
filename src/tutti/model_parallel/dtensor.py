"""Portions whose parameters are DTensors, and tensor parallelism after a plan of the user's.

A plan is {name of a module: style}; `torch.distributed.tensor.parallel` has the styles: ColwiseParallel,
RowwiseParallel and others.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadModel, BadOption
from tutti.load_object import load_object
from tutti.model_parallel.base import LayoutRanks, Of, TeamPortion, taken, values_of
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.places import PartPlace, PartPlaces
from tutti.optim.clipping import clip_gradients
from tutti.optim.runs import is_elementwise
from tutti.optim.state import held_by
from tutti.replica import Gradients, Replica, local
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Strategy, Worker


class DTensorPortion(TeamPortion):
    """One rank's portion of a model that torch.distributed divides."""

    @cached_property
    @override
    def places(self) -> PartPlaces:
        return PartPlaces({name: self._place(name, p) for name, p in self.module.named_parameters()})

    def _place(self, name: str, parameter: nn.Parameter) -> PartPlace:
        ranks, data = self.ranks, parameter.data
        # Only what the trainer lays out is divided over the teams, too.
        saves = not isinstance(data, DTensor) or ranks.data.rank == 0
        if not _divided(parameter):
            return PartPlace.whole(name, parameter, saves and ranks.team.rank == 0)
        assert isinstance(data, DTensor), "it is divided"
        (placement,) = data.placements
        dim = cast("Shard", placement).dim
        length, part = data.shape[dim], local(data)
        start = min(ranks.team.rank * -(-length // ranks.team.size), length)
        return replace(PartPlace.along(name, part, dim, length, start), saves=saves)

    @override
    def place(self, strategy: Strategy) -> Replica:
        replica = Replica(self.module)
        replica.gradients.share = self._share
        replica.gradients.keep_apart(self.module.parameters())
        return replica

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        return DTensorWorker(self.module, self.data, optimizer, clip, replica.gradients)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        return whole_state(self.module, of)


class DTensorWorker(Worker):
    """The worker of parameters that torch.distributed has placed: DTensors, and others among them."""

    def __init__(
        self,
        module: nn.Module,
        data: Communicator,
        optimizer: Optimizer,
        clip: Clip,
        gradients: Gradients,
    ) -> None:
        super().__init__()
        self._data, self._optimizer, self._clip, self._gradients = data, optimizer, clip, gradients
        self._parts = OwnParts(optimizer) if is_elementwise(optimizer) else None
        for group in [] if self._parts else optimizer.param_groups:
            # The loops over all parameters at once refuse DTensors among plain tensors.
            group["foreach"] = False
        moved = self._parts.moved if self._parts else {}
        self._names = {moved.get(p, p): name for name, p in module.named_parameters()}
        self._divide_state()

    @override
    def step(self) -> None:
        began = self._data.clock()
        sent = self._add_up() if self._data.size > 1 else 0
        self.traffic.add(sent, self._data.clock() - began, staleness=0)
        with self.updating:
            clip_gradients(self._gradients, self._clip.norm, self._clip.value)
            with self._parts or nullcontext():
                self._optimizer.step()
        self._gradients.zero()

    @override
    def state(self) -> State:
        """Return what the optimizer keeps for this rank's parts of the parameters."""
        return State(joint=held_by(self._optimizer, self._names))

    @override
    def load_state(self, saved: Saved) -> None:
        """Do nothing: the optimizer has its state."""

    @torch.no_grad()
    def _divide_state(self) -> None:
        """Have this rank's part of an optimizer's state divided as the parameters are."""
        for parameter in self._names:
            part, kept = local(parameter.detach()), self._optimizer.state.get(parameter, {})
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    own = value.clone()
                    kept[key] = _like(parameter, own) if value.shape == part.shape else own

    @override
    def finish(self) -> None:
        """Every step leaves the final weights in place."""

    @torch.no_grad()
    def _add_up(self) -> int:
        """Sum the gradients over the teams; returns the bytes sent."""
        sent = 0
        for gradient in self._gradients.vectors():
            total = gradient.contiguous().view(-1)
            self._data.all_reduce(total)
            gradient.copy_(total.view(gradient.shape))
            sent += total.nbytes
        return sent


class OwnParts:
    """A rank's own parts of an optimizer's parameters, as tensors that it moves instead, for `with`.

    For each operation on DTensors torch works out how its result is divided, which takes longer than the
    operation on a small tensor. An elementwise optimizer gives the same without.

    Args:
        optimizer: elementwise. From now on it keeps its state for the parts; outside of `with` its param
            groups have the parameters.

    Attributes:
        moved: the parts, by the model's parameter.
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
        """Have the optimizer move the parts by the gradients of the parameters."""
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


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Return a part of a tensor that is divided as a parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


def whole_state(module: nn.Module, of: Of) -> dict[str, Any]:
    """The state of a module by name, its DTensors as ordinary tensors (collective over their mesh)."""
    whole: dict[Tensor, Tensor] = {}
    for value in module.state_dict(keep_vars=True).values():
        if isinstance(value, DTensor) and value not in whole:
            whole[value] = cast("DTensor", of(value)).full_tensor()
    return taken(module, lambda tensor: whole[tensor] if tensor in whole else of(tensor))


class PlannedPortion(DTensorPortion):
    """The parts that a plan gives one rank of a model's parameters.

    Args:
        module: the model, alike on all ranks. Its parameters are divided in place.
        spec: file.py:function or package.module:function, called with the module; returns the plan.

    Raises:
        BadOption: there is no such function, or it returned something else.
        BadModel: the plan does not fit the model.
    """

    def __init__(self, module: nn.Module, ranks: LayoutRanks, group: TeamMesh, spec: str) -> None:
        super().__init__(module, ranks, lambda p: _divided(p) or ranks.team.rank == 0, group)
        plan = _plan(spec, module)
        try:
            parallelize_module(module, group.team, plan)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise BadModel(f"the plan '{spec}' does not fit the model: {error}; mend one of them") from error


def _plan(spec: str, module: nn.Module) -> dict[str, ParallelStyle]:
    function = load_object(spec, "plan")
    if not callable(function):
        raise BadOption(f"the plan '{spec}' is no function; name one that takes the model and returns a plan")
    plan = function(module)
    names = dict(module.named_modules())
    if not isinstance(plan, dict) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise BadOption(
            f"the plan '{spec}' returned {type(plan).__name__}; it must return a dict from names of modules "
            "to styles of torch.distributed.tensor.parallel, such as {'0': ColwiseParallel()}"
        )
    for name in plan:
        if "*" not in name and name not in names:
            have = ", ".join(filter(None, names))
            raise BadModel(f"the plan '{spec}' names '{name}', which the model does not have; it has: {have}")
    return plan


def _divided(parameter: nn.Parameter) -> bool:
    return isinstance(parameter.data, DTensor) and any(
        place.is_shard() for place in parameter.data.placements
    )
