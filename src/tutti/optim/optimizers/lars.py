"""LARS: SGD with momentum whose rate is scaled for each parameter, for large batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tutti.optim.parameterwise import ParameterWise
from tutti.registry import part


@part("lars")
class LARS(ParameterWise):
    """Layer-wise adaptive rate scaling.

        rate = trust |w| / (|g| + weight_decay |w|)          for each parameter; 1 where |w| or |g| is 0
        v = momentum v + lr rate (g + weight_decay w)
        w = w - v

    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv:1708.03888,
    equation 6 and algorithm 1. A rate of 1 where a norm is 0 lets biases leave their zeros, which the
    equation alone would not.

    Args:
        params: parameters, or param groups.
        lr: gamma, the global rate.
        momentum: m, 0 to below 1.
        weight_decay: beta, from 0.
        trust: eta, how far one step may move a parameter, as a share of its norm; above 0.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        trust: float = 0.001,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1 or trust <= 0:
            raise ValueError(
                f"lr is {lr}, momentum {momentum}, weight_decay {weight_decay}, trust {trust}; expected lr "
                "and weight_decay from 0, momentum from 0 to below 1, trust above 0"
            )
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, options)

    @override
    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        rate = local_rate(weights, gradient, group["weight_decay"], group["trust"])
        change = gradient.add(weights, alpha=group["weight_decay"])
        velocity = state["momentum_buffer"]
        velocity.mul_(group["momentum"]).add_(change, alpha=float(group["lr"]) * rate)
        weights.sub_(velocity)


def local_rate(weights: Tensor, gradient: Tensor, weight_decay: float, trust: float) -> float:
    """Return the rate of one parameter, as a factor of the global one: equation 6; 1 where a norm is 0."""
    size, slope = float(weights.norm()), float(gradient.norm())
    return trust * size / (slope + weight_decay * size) if size > 0 and slope > 0 else 1.0
