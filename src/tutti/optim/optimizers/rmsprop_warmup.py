"""RMSprop at first, SGD with momentum later, and a smooth change between them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tutti.optim.parameterwise import ParameterWise
from tutti.registry import part


@part("rmsprop_warmup")
class RMSpropWarmup(ParameterWise):
    """The RMSprop warm-up for large batches: the start of training is the hard part for SGD.

        s = decay s + (1 - decay) g^2
        a = share of SGD, see `sgd_share`
        v = momentum v - (a + (1 - a) (rmsprop_lr / lr) / (sqrt(s) + eps)) g
        w = w + lr v

    Source: Akiba, Suzuki, Fukuda 2017, "Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet in 15
    Minutes", arXiv:1711.04325, section on the RMSprop warm-up; there the change is centred at epoch 10 and 5
    epochs long.

    Args:
        params: parameters, or param groups.
        lr: eta, the rate of SGD, above 0.
        momentum: mu1, 0 to below 1.
        decay: mu2, 0 to below 1.
        eps: added to the root, above 0.
        rmsprop_lr: the rate of RMSprop, above 0.
        centre: the update in which both have the same share, from 0.
        period: how many updates the change takes, above 0.
        weight_decay: added to the gradient, times the weights; from 0.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        decay: float = 0.99,
        eps: float = 1e-8,
        rmsprop_lr: float = 3e-4,
        centre: float = 1000,
        period: float = 500,
        weight_decay: float = 0.0,
    ) -> None:
        if min(lr, eps, rmsprop_lr, period) <= 0 or min(centre, weight_decay) < 0:
            raise ValueError(
                f"lr is {lr}, eps {eps}, rmsprop_lr {rmsprop_lr}, period {period}, centre {centre}, "
                f"weight_decay {weight_decay}; expected the first four above 0, the others from 0"
            )
        if not (0 <= momentum < 1 and 0 <= decay < 1):
            raise ValueError(f"momentum is {momentum}, decay {decay}; expected both from 0 to below 1")
        options = {"lr": lr, "momentum": momentum, "decay": decay, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "rmsprop_lr": rmsprop_lr, "centre": centre, "period": period})

    @override
    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if not state:
            state.update(step=0, square=torch.zeros_like(weights), velocity=torch.zeros_like(weights))
        if group["weight_decay"]:
            gradient = gradient.add(weights, alpha=group["weight_decay"])
        lr, share = float(group["lr"]), sgd_share(state["step"], group["centre"], group["period"])
        state["step"] += 1
        square = state["square"].mul_(group["decay"]).addcmul_(gradient, gradient, value=1 - group["decay"])
        velocity = state["velocity"].mul_(group["momentum"]).sub_(gradient, alpha=share)
        # lr v with rmsprop_lr / lr in v: for lr = 0, where a schedule may end, nothing moves.
        rmsprop = (1 - share) * group["rmsprop_lr"] / lr if lr > 0 else 0.0
        if rmsprop:
            velocity.addcdiv_(gradient, square.sqrt().add_(group["eps"]), value=-rmsprop)
        weights.add_(velocity, alpha=lr)


def sgd_share(step: float, centre: float, period: float) -> float:
    """Return SGD's share of the update: the paper's transition function, smooth, and 1 in the end.

        exp(2 (t - centre) / period) / 2        until centre
        1/2 + (t - centre) / period             until centre + period / 2
        1                                       from then on

    Args:
        step: t, in updates.
        centre: where it is 1/2.
        period: how long the change takes, in the same unit.
    """
    along = (step - centre) / period
    return 0.5 * math.exp(2 * along) if along < 0 else min(1.0, 0.5 + along)
