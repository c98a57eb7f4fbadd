"""Tensor parallelism after a plan of the user's, {name of a module: style}, by PyTorch's DTensor.

`torch.distributed.tensor.parallel` has the styles: ColwiseParallel, RowwiseParallel and others.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.optim import Optimizer
from typing_extensions import override

from tutti.errors import BadModel, BadOption
from tutti.imports import load_object
from tutti.parallel.base import Portion, Ranks, count_of
from tutti.parallel.group import Group
from tutti.parallel.moving import Scattered, gradients_of
from tutti.parallel.sharded import whole_state
from tutti.replica import Replica
from tutti.strategies.base import Clip, Strategy, Worker


class PlannedPortion(Portion):
    """The parts that a plan gives one rank of a model's parameters.

    Args:
        module: the model, alike on all ranks. Its parameters are divided in place.
        ranks: who holds what.
        group: torch.distributed among them.
        spec: file.py:function or package.module:function, called with the module; returns the plan.

    Raises:
        BadOption: there is no such function, or it returned something else.
        BadModel: the plan does not fit the model.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, group: Group, spec: str) -> None:
        self.module, self.peers, self.parameters = module, ranks.data, count_of(module)
        self._ranks, self._group = ranks, group
        plan = _plan(spec, module)
        try:
            parallelize_module(module, group.team, plan)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise BadModel(f"the plan '{spec}' does not fit the model: {error}; mend one of them") from error
        self._gradients = gradients_of(module, lambda p: _divided(p) or ranks.team.rank == 0)

    @override
    def place(self, strategy: Strategy) -> Replica:
        return Replica(self.module)

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        return Scattered(self._ranks, optimizer, clip, self._gradients)

    @override
    def state(self) -> dict[str, Any]:
        return whole_state(self.module)

    @override
    def close(self) -> None:
        self._group.close()
        self._ranks.close()


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
