"""LAMB: Adam whose rate is scaled for each parameter, for large batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tutti.optim.parameterwise import ParameterWise
from tutti.registry import part


@part("lamb")
class LAMB(ParameterWise):
    """Layer-wise adaptive moments for batch training.

        m = beta1 m + (1 - beta1) g             M = m / (1 - beta1^t)
        v = beta2 v + (1 - beta2) g^2           V = v / (1 - beta2^t)
        u = M / (sqrt(V) + eps) + weight_decay w
        w = w - lr (|w| / |u|) u                for each parameter; the ratio is 1 where a norm is 0

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    arXiv:1904.00962, algorithm 2, with the identity for its scaling function phi.

    Args:
        params: parameters, or param groups.
        lr: eta, from 0.
        betas: decay of the first and the second moment, 0 to below 1.
        eps: added to the root, from 0.
        weight_decay: lambda, from 0.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr is {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}; expected betas from 0 "
                "to below 1 and the others from 0"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @override
    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if not state:
            state["step"] = torch.zeros(())
            state.update(exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
        step = float(state["step"].add_(1))
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (first / (1 - beta1**step)).div_(root).add_(weights, alpha=group["weight_decay"])
        weights.sub_(update, alpha=float(group["lr"]) * trust_ratio(weights, update))


def trust_ratio(weights: Tensor, update: Tensor) -> float:
    """Return |w| / |u|; 1 where one of them is 0."""
    size, length = float(weights.norm()), float(update.norm())
    return size / length if size > 0 and length > 0 else 1.0
