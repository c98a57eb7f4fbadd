"""A cosine after a warm-up."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from tutti.registry import part


@part("warmup_cosine")
class WarmupCosineLR(LRScheduler):
    """Linear warm-up to the optimizer's rate, then half a cosine down to a share of it.

        lr(t) = lr (t + 1) / (warmup + 1)                                       t < warmup
        lr(t) = lr (final + (1 - final) (1 + cos(pi (t - warmup) / rest)) / 2)  rest = total_steps - warmup

    Source: Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    arXiv:1608.03983, equation 5, for the cosine; Goyal et al. 2017, arXiv:1706.02677, section 2.2, for the
    warm-up.

    Args:
        optimizer: its rate is the largest.
        total_steps: the number of updates of the run.
        warmup: the length of the warm-up in updates, from 0; below 1 it is a share of `total_steps`.
        final: the share of the rate at the end, from 0 to 1.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup: float = 0.05,
        final: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total = total_steps
        self.warmup = round(warmup * total_steps) if 0 < warmup < 1 else int(warmup)
        if not 0 <= self.warmup < total_steps or not 0 <= final <= 1:
            raise ValueError(
                f"warmup is {warmup}, final {final}; expected warmup from 0 to below {total_steps} updates, "
                "final from 0 to 1"
            )
        self.final = final
        super().__init__(optimizer, last_epoch)

    @override
    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the param groups after `last_epoch` updates."""
        if self.last_epoch < self.warmup:
            factor = (self.last_epoch + 1) / (self.warmup + 1)
        else:
            done = min(1.0, (self.last_epoch - self.warmup) / (self.total - self.warmup))
            factor = self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        return [float(lr) * factor for lr in self.base_lrs]
