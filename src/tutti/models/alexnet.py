"""AlexNet."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from tutti.models.fitting import as_maps, image_size, is_small, share, whole_numbers
from tutti.registry import part

CONVOLUTIONS = ((192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True))
"""Maps and size of the convolutions behind the first, and whether a pooling follows."""

SMALLEST = 63
"""Height and width that leave one number of each map behind the third pooling."""

SMALLEST_SMALL = 8
"""The same without the first two halvings."""


@part("alexnet")
def alexnet(
    shape: tuple[int, ...],
    outputs: int,
    hidden: object = (4096, 4096),
    dropout: float = 0.5,
    stem: str = "auto",
) -> nn.Module:
    """Build AlexNet in the form for one processor: five convolutions and three dense layers.

    On 3 x 224 x 224 with 1000 outputs it has 61,100,840 parameters, named as torchvision's.

    Krizhevsky, Sutskever, Hinton 2012, "ImageNet Classification with Deep Convolutional Neural Networks";
    Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", whose sizes of
    layers these are. Initialised by torch's defaults, as torchvision's.

    Args:
        shape: of one image: (channels, height, width) or (height, width), at least 8 x 8; with the large
            stem 63 x 63.
        outputs: size of the last layer.
        hidden: sizes of the dense layers before it.
        dropout: probability with which each input of these is dropped in training.
        stem: "large": the first convolution is 11 x 11 and quarters the image; "small": 3 x 3, and leaves
            its size, for images such as CIFAR's; "auto": small where a side is below 64 pixels.

    Raises:
        BadModel: the inputs are no images, or too small.
        BadOption, UnknownName: an option's value cannot be used.
    """
    small = is_small(stem, shape)
    channels, _, _ = image_size("alexnet", shape, SMALLEST_SMALL if small else SMALLEST)
    dropped = share("dropout", dropout)
    # On small images padding makes pooling round up: 32, 16, 8, 4 and 28, 14, 7, 4.
    pooling = nn.MaxPool2d(3, stride=2, padding=1 if small else 0)
    first = nn.Conv2d(channels, 64, 3, padding=1) if small else nn.Conv2d(channels, 64, 11, 4, padding=2)
    features, width = [first, nn.ReLU(inplace=True), pooling], 64
    for maps, size, pooled in CONVOLUTIONS:
        features += [nn.Conv2d(width, maps, size, padding=size // 2), nn.ReLU(inplace=True)]
        features += [pooling] if pooled else []
        width = maps
    side = 4 if small else 6
    width, dense = width * side * side, list[nn.Module]()
    for size in whole_numbers("hidden", hidden):
        dense += [nn.Dropout(dropped), nn.Linear(width, size), nn.ReLU(inplace=True)]
        width = size
    layers: dict[str, nn.Module] = {
        "maps": as_maps(shape),
        "features": nn.Sequential(*features),
        "avgpool": nn.AdaptiveAvgPool2d(side),
        "flatten": nn.Flatten(),
        "classifier": nn.Sequential(*dense, nn.Linear(width, outputs)),
    }
    return nn.Sequential(OrderedDict(layers))
