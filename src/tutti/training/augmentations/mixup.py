"""Mixtures of two samples."""

from __future__ import annotations

from torch import Tensor

from tutti.data.columns import Inputs
from tutti.errors import BadData, BadOption
from tutti.registry import part
from tutti.training.augmentations import SampleRandom


@part("mixup")
def mixup(inputs: Inputs, targets: Tensor, random: SampleRandom, alpha: float = 0.2) -> tuple[Inputs, Tensor]:
    """Mix each sample with another one of the data, and their targets likewise; classes become shares.

    How much is drawn from Beta(alpha, alpha): the smaller alpha, the more often it is nearly all of one.

    Source: Zhang, Cisse, Dauphin and Lopez-Paz, mixup: beyond empirical risk minimization, 2018.
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise BadData("--augment mixup is for one input of numbers that can be mixed; leave it out")
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise BadOption(f"--augment.mixup is {alpha!r}; give a number above 0, such as 0.2")
    others, theirs = random.others()
    assert isinstance(others, Tensor), "as the inputs themselves"
    share = random.beta(alpha)
    # Products and sums by themselves: their rounding must not depend on the place in the batch.
    return _mixed(inputs, others, share), _mixed(random.shares(targets), random.shares(theirs), share)


def _mixed(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    share = share.to(one.dtype).view(-1, *[1] * (one.dim() - 1))
    return one * share + other * (1 - share)
