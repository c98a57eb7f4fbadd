"""VGG networks."""

from __future__ import annotations

from torch import nn

from tutti.models.fitting import image_size, share
from tutti.registry import part

VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Maps of the convolutions of configuration A, by block."""

SMALLEST = 17
"""Height and width that leave more than one number of each map to the last block: BatchNorm has nothing to
normalise where a worker's part of a batch is one sample and its map one number."""


@part("vgg11")
def vgg11(shape: tuple[int, ...], outputs: int, dropout: float = 0.0) -> nn.Module:
    """Build VGG configuration A with BatchNorm, and one dense layer on the averaged maps.

    Simonyan, Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition", table 1;
    Ioffe, Szegedy 2015, "Batch Normalization". The paper's two wide dense layers are left out, as is usual
    for images of 32 x 32.

    Args:
        shape: of one image: (channels, height, width) or (height, width), at least 17 x 17.
        outputs: size of the last layer.
        dropout: probability with which each input of the last layer is dropped in training.

    Raises:
        BadModel: the inputs are no images, or too small.
        BadOption: a probability that cannot be used.
    """
    channels, height, _ = image_size("vgg11", shape, SMALLEST)
    dropped = share("dropout", dropout)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, height))] if len(shape) == 2 else []
    for block in VGG11:
        for maps in block:
            layers += [
                nn.Conv2d(channels, maps, kernel_size=3, padding=1, bias=False),
                nn.BatchNorm2d(maps),
                nn.ReLU(inplace=True),
            ]
            channels = maps
        # Rounded up, so that images below 32 x 32 have something left behind the fifth pooling.
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if dropped:
        layers.append(nn.Dropout(dropped))
    return nn.Sequential(*layers, nn.Linear(channels, outputs))
