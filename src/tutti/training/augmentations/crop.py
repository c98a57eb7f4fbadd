"""Random crops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tutti.errors import BadOption
from tutti.registry import part
from tutti.training.augmentations import SampleRandom, refuse_no_images


@part("crop")
def crop(inputs: Tensor, targets: Tensor, random: SampleRandom, pixels: int = 4) -> tuple[Tensor, Tensor]:
    """Move images by up to so many pixels; zeros, which are the mean of pixels, come in at the edges.

    Source: He, Zhang, Ren and Sun, Deep residual learning for image recognition, 2016, section 4.2.
    """
    refuse_no_images(inputs, "crop")
    if not isinstance(pixels, int) or pixels < 1:
        raise BadOption(f"--augment.crop is {pixels!r}; give a whole number of pixels, such as 4")
    height, width = inputs.shape[2:]
    down, right = random.integers(2 * pixels + 1, 2).unbind(1)
    padded = functional.pad(inputs, (pixels,) * 4)
    places = padded.unfold(2, height, 1).unfold(3, width, 1)
    return places[torch.arange(len(inputs), device=inputs.device), :, down, right], targets
