"""Mirror images."""

from __future__ import annotations

from torch import Tensor

from tutti.errors import BadOption
from tutti.registry import part
from tutti.training.augmentations import SampleRandom, refuse_no_images


@part("flip")
def flip(inputs: Tensor, targets: Tensor, random: SampleRandom, share: float = 0.5) -> tuple[Tensor, Tensor]:
    """Exchange left and right in a share of the images, by chance."""
    refuse_no_images(inputs, "flip")
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise BadOption(f"--augment.flip is {share!r}; give a share from 0 to 1")
    turned = (random.uniform() < share).nonzero()[:, 0]
    return inputs.index_copy_(0, turned, inputs.index_select(0, turned).flip(3)), targets
