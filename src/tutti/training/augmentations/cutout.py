"""Squares that are cut out."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.errors import BadOption
from tutti.registry import part
from tutti.training.augmentations import SampleRandom, refuse_no_images


@part("cutout")
def cutout(inputs: Tensor, targets: Tensor, random: SampleRandom, side: int = 8) -> tuple[Tensor, Tensor]:
    """Put zeros into a square of so many pixels a side, around any pixel; its part outside has no effect.

    Source: DeVries and Taylor, Improved regularization of convolutional neural networks with cutout, 2017.
    """
    refuse_no_images(inputs, "cutout")
    if not isinstance(side, int) or side < 1:
        raise BadOption(f"--augment.cutout is {side!r}; give the side of the square in pixels, such as 8")
    inside = []
    for length in inputs.shape[2:]:
        first = random.integers(length, 1) - side // 2
        places = torch.arange(length, device=inputs.device)
        inside.append((places >= first) & (places < first + side))
    rows, columns = inside
    return inputs.masked_fill_((rows[:, :, None] & columns[:, None, :]).unsqueeze(1), 0), targets
