"""Tensor parallelism after a plan of the user's, {name of a module: style}, by PyTorch's DTensor.

`torch.distributed.tensor.parallel` has the styles: ColwiseParallel, RowwiseParallel and others.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tutti.errors import BadModel, BadOption
from tutti.imports import load_object
from tutti.parallel.base import Ranks
from tutti.parallel.group import Group
from tutti.parallel.moving import Gradients
from tutti.parallel.scattered import ScatteredPortion


class PlannedPortion(ScatteredPortion):
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
        super().__init__(module, ranks.data, ranks, group)
        plan = _plan(spec, module)
        try:
            parallelize_module(module, group.team, plan)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise BadModel(f"the plan '{spec}' does not fit the model: {error}; mend one of them") from error
        self.gradients = Gradients(module, lambda p: _divided(p) or ranks.team.rank == 0)


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
