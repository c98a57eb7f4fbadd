"""Optimizers that move one parameter after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer


class ParameterWise(Optimizer):
    """An optimizer that treats each parameter by itself, as a whole."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient; returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Move one parameter of a param group, in place, by its gradient, which is left as it is."""


def is_parameterwise(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer is known to treat each parameter by itself.

    Those of torch and our own do. Any other may use what all parameters have together, such as their norm.
    """
    return type(optimizer) in vars(optim).values() or isinstance(optimizer, ParameterWise)
