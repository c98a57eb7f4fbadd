"""The linear scaling rule: k times the batch, k times the rate, after a warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from tutti.registry import part


@part("linear_scaling")
class LinearScalingLR(LRScheduler):
    """Linear scaling with gradual warm-up, and later drops if wanted.

        lr(t) = lr (1 + (factor - 1) min(1, t / warmup)) gamma^(number of drops until t)

    Goyal et al. raise the rate lr of one worker's batch to `factor` = (whole batch) / (that batch) times it
    within the first 5 of 90 epochs, and divide it by 10 after 30, 60 and 80 of them: drops 1/3, 2/3 and 8/9.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677,
    sections 2.1 and 2.2.

    Args:
        optimizer: its rate is right for the small batch.
        total_steps: the number of updates of the run.
        factor: k, the ratio of this batch to the one that the rate is right for; above 0. It has no default,
            as the other batch is not known here.
        warmup: the length of the warm-up in updates, from 0. None: the paper's share, 1/18 of the run.
        drops: the times at which the rate falls, as shares of the run, each between 0 and 1.
        gamma: the factor of a drop, above 0.
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        factor: float,
        warmup: int | None = None,
        drops: Sequence[float] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.warmup = round(total_steps / 18) if warmup is None else warmup
        if factor <= 0 or gamma <= 0 or self.warmup < 0 or not all(0 < share < 1 for share in drops):
            raise ValueError(
                f"factor is {factor}, warmup {warmup}, drops {list(drops)}, gamma {gamma}; expected factor "
                "and gamma above 0, warmup from 0, drops between 0 and 1"
            )
        self.factor, self.gamma = factor, gamma
        self.drops = [share * total_steps for share in drops]
        super().__init__(optimizer, last_epoch)

    @override
    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the param groups after `last_epoch` updates."""
        step = self.last_epoch
        risen = min(1.0, step / self.warmup) if self.warmup else 1.0
        fallen = self.gamma ** sum(step >= drop for drop in self.drops)
        return [float(lr) * (1 + (self.factor - 1) * risen) * fallen for lr in self.base_lrs]
