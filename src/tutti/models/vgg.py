"""VGG networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import ceil

from torch import nn

from tutti.models.fitting import (
    SMALL,
    as_maps,
    draw_convolutions,
    draw_dense,
    flag,
    image_size,
    share,
    whole_numbers,
)
from tutti.registry import part

MAPS = (64, 128, 256, 512, 512)
"""Maps of the convolutions, by block."""

SMALLEST = 17
"""Height and width that leave more than one number of each map to the last block: BatchNorm has nothing to
normalise where a worker's part of a batch is one sample and its map one number."""


@part("vgg11")
def vgg11(
    shape: tuple[int, ...],
    outputs: int,
    batch_norm: bool = True,
    hidden: object = "auto",
    dropout: float | None = None,
) -> nn.Module:
    """Build VGG configuration A: eight convolutions. Options and errors are those of `vgg`."""
    return vgg("vgg11", (1, 1, 2, 2, 2), shape, outputs, batch_norm, hidden, dropout)


@part("vgg16")
def vgg16(
    shape: tuple[int, ...],
    outputs: int,
    batch_norm: bool = True,
    hidden: object = "auto",
    dropout: float | None = None,
) -> nn.Module:
    """Build VGG configuration D: thirteen convolutions. Options and errors are those of `vgg`."""
    return vgg("vgg16", (2, 2, 3, 3, 3), shape, outputs, batch_norm, hidden, dropout)


@part("vgg19")
def vgg19(
    shape: tuple[int, ...],
    outputs: int,
    batch_norm: bool = True,
    hidden: object = "auto",
    dropout: float | None = None,
) -> nn.Module:
    """Build VGG configuration E: sixteen convolutions. Options and errors are those of `vgg`."""
    return vgg("vgg19", (2, 2, 4, 4, 4), shape, outputs, batch_norm, hidden, dropout)


def vgg(
    name: str,
    convolutions: Sequence[int],
    shape: tuple[int, ...],
    outputs: int,
    batch_norm: bool,
    hidden: object,
    dropout: float | None,
) -> nn.Module:
    """Build five blocks of 3 x 3 convolutions with ReLU, each with maximum pooling, and dense layers.

    Simonyan, Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition", table 1;
    Ioffe, Szegedy 2015, "Batch Normalization". On 3 x 224 x 224 with 1000 outputs and without BatchNorm
    vgg11, vgg16 and vgg19 have the 132,863,336, 138,357,544 and 143,667,240 parameters of the paper (table 2:
    133, 138 and 144 million). Initialised as torchvision's.

    Args:
        name: of the model.
        convolutions: how many of them each block has.
        shape: of one image: (channels, height, width) or (height, width), at least 17 x 17.
        outputs: size of the last layer.
        batch_norm: whether BatchNorm follows each convolution, in place of its bias. The paper has none.
        hidden: sizes of the dense layers before the last one; "auto": the paper's 4096, 4096, or none where
            a side of the images is below 64 pixels, as is usual for CIFAR. Without any the maps are averaged.
        dropout: probability with which each input of the last layer, and of every hidden one but the first,
            is dropped in training; by default the paper's 0.5 where there are hidden layers.

    Raises:
        BadModel: the inputs are no images, or too small.
        BadOption: an option's value cannot be used.
    """
    channels, height, width = image_size(name, shape, SMALLEST)
    normed = flag("batch_norm", batch_norm)
    sizes = [4096, 4096] if hidden == "auto" else whole_numbers("hidden", hidden)
    if hidden == "auto" and min(height, width) < SMALL:
        sizes = []
    dropped = share("dropout", (0.5 if sizes else 0.0) if dropout is None else dropout)
    rows, columns = (min(7, ceil(side / 32)) if sizes else 1 for side in (height, width))
    inputs, dense = MAPS[-1] * rows * columns, list[nn.Module]()
    for size in sizes:
        dense += [nn.Linear(inputs, size), nn.ReLU(inplace=True), nn.Dropout(dropped)]
        inputs = size
    dense += [nn.Dropout(dropped)] if dropped and not sizes else []
    layers: dict[str, nn.Module] = {
        "maps": as_maps(shape),
        "features": _features(channels, convolutions, normed),
        "avgpool": nn.AdaptiveAvgPool2d((rows, columns)),
        "flatten": nn.Flatten(),
        "classifier": nn.Sequential(*dense, nn.Linear(inputs, outputs)),
    }
    network = nn.Sequential(OrderedDict(layers))
    draw_convolutions(network)
    draw_dense(network, deviation=0.01)
    return network


def _features(channels: int, convolutions: Sequence[int], normed: bool) -> nn.Module:
    features = list[nn.Module]()
    for maps, count in zip(MAPS, convolutions, strict=True):
        for _ in range(count):
            features.append(nn.Conv2d(channels, maps, kernel_size=3, padding=1, bias=not normed))
            features += [nn.BatchNorm2d(maps)] if normed else []
            features.append(nn.ReLU(inplace=True))
            channels = maps
        # Rounded up, so that images below 32 x 32 are not empty after the fifth pooling.
        features.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*features)
