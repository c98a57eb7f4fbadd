"""LeNet-5 with today's parts."""

from __future__ import annotations

from torch import nn

from tutti.models.fitting import as_maps, image_size
from tutti.registry import part

SMALLEST = 12
"""Height and width that leave one number of each map behind the last pooling."""


@part("lenet")
def lenet(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build a network in the layout of LeNet-5, with ReLU and maximum pooling.

    On 28 x 28 the maps have the classic sizes: 28, 14, 10, 5.

    LeCun, Bottou, Bengio, Haffner 1998, "Gradient-Based Learning Applied to Document Recognition",
    section II B.

    Args:
        shape: of one image: (channels, height, width) or (height, width), at least 12 x 12.
        outputs: size of the last layer.

    Raises:
        BadModel: the inputs are no images, or too small.
    """
    channels, height, width = image_size("lenet", shape, SMALLEST)
    flat = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        as_maps(shape),
        nn.Conv2d(channels, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )
