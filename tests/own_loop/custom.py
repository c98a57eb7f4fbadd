"""Optimizers of the kinds that people write."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class Counting(Optimizer):
    """Of the kind of Schedule-Free: counts in its param group, and has the weights of two points in turn.

    After Defazio et al. 2024, "The Road Less Scheduled", with SGD.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    def eval(self) -> None:
        self._move(to_training=False)

    def train(self) -> None:
        self._move(to_training=True)

    @torch.no_grad()
    def _move(self, to_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_training:
                continue
            beta = group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - beta if to_training else 1 - 1 / beta)
            group["train_mode"] = to_training

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            average = 1 / (group["k"] + 1)
            rate, beta = group["lr"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], average)
                p.add_(p.grad, alpha=rate * (beta * (1 - average) - 1))
                state["z"].sub_(p.grad, alpha=rate)
            group["k"] += 1
