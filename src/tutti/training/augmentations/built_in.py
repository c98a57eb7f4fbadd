"""The transforms that have a name; each may have one option, its last parameter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tutti.errors import BadOption
from tutti.registry import part
from tutti.training.augmentations import SampleRandom, refuse_no_images


def _refuse(right: bool, name: str, value: object, wanted: str) -> None:
    if not right:
        raise BadOption(f"--augment.{name} is {value!r}; give {wanted}")


@part("crop")
def crop(inputs: Tensor, targets: Tensor, random: SampleRandom, pixels: int = 4) -> tuple[Tensor, Tensor]:
    """Shift images by up to `pixels` pixels; the edges are filled with zeros, the mean of pixels.

    Source: He, Zhang, Ren and Sun, Deep residual learning for image recognition, 2016, section 4.2.
    """
    refuse_no_images(inputs, "crop")
    _refuse(isinstance(pixels, int) and pixels >= 1, "crop", pixels, "a whole number of pixels, such as 4")
    height, width = inputs.shape[2:]
    down, right = random.integers(2 * pixels + 1, 2).unbind(1)
    padded = functional.pad(inputs, (pixels,) * 4)
    places = padded.unfold(2, height, 1).unfold(3, width, 1)
    return places[torch.arange(len(inputs), device=inputs.device), :, down, right], targets


@part("flip")
def flip(inputs: Tensor, targets: Tensor, random: SampleRandom, share: float = 0.5) -> tuple[Tensor, Tensor]:
    """Flip a random share of the images horizontally."""
    refuse_no_images(inputs, "flip")
    _refuse(isinstance(share, int | float) and 0 <= share <= 1, "flip", share, "a share from 0 to 1")
    turned = (random.uniform() < share).nonzero()[:, 0]
    return inputs.index_copy_(0, turned, inputs.index_select(0, turned).flip(3)), targets
