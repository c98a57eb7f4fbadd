"""A small convolutional network."""

from __future__ import annotations

from torch import nn

from tutti.errors import BadOption
from tutti.models.fitting import as_maps, image_size, share, whole_number, whole_numbers
from tutti.registry import part

SMALLEST = 4
"""Height and width that leave one number of each map behind the second pooling."""


@part("cnn")
def cnn(
    shape: tuple[int, ...],
    outputs: int,
    channels: object = (32, 64),
    hidden: object = 128,
    dropout: float = 0.0,
) -> nn.Module:
    """Build two 3 x 3 convolutions, each with ReLU and maximum pooling, and a dense layer.

    On 28 x 28 with 10 outputs it has 421,642 parameters.

    Args:
        shape: of one image: (channels, height, width) or (height, width), at least 4 x 4.
        outputs: size of the last layer.
        channels: the maps of the two convolutions.
        hidden: size of the dense layer.
        dropout: probability with which each of its outputs is dropped in training.

    Raises:
        BadModel: the inputs are no images, or too small.
        BadOption: a size or a probability that cannot be used.
    """
    inputs, height, width = image_size("cnn", shape, SMALLEST)
    maps, dense = whole_numbers("channels", channels), whole_number("hidden", hidden)
    dropped = share("dropout", dropout)
    if len(maps) != 2:
        raise BadOption(f"option 'channels' has {len(maps)} numbers; give one for each convolution: 32,64")
    return nn.Sequential(
        as_maps(shape),
        nn.Conv2d(inputs, maps[0], kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(maps[0], maps[1], kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(maps[1] * (height // 4) * (width // 4), dense),
        nn.ReLU(),
        nn.Dropout(dropped) if dropped else nn.Identity(),
        nn.Linear(dense, outputs),
    )
