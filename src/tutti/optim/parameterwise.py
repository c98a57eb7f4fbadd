"""Optimizers that move one parameter after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer


class ParameterWise(Optimizer):
    """An optimizer that treats each parameter independently, as a whole."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient; return the result of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    def cost(self, weights: Tensor, group: dict[str, Any]) -> int:
        """Return the time of `move` for a parameter of a param group, in any unit."""
        return weights.numel()

    @abstractmethod
    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Move one parameter of a param group, in place, by its gradient, which must not change."""


def is_parameterwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer treats each parameter independently, as torch's and ours do."""
    return type(optimizer) in vars(optim).values() or isinstance(optimizer, ParameterWise)
