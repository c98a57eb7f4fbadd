"""MobileNetV2."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from typing_extensions import override

from tutti.errors import BadOption
from tutti.models.fitting import as_maps, draw_convolutions, draw_dense, image_size, is_small, share
from tutti.registry import part

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, maps, number of blocks, and stride of the first one, by stage: table 2."""

SMALLEST = 33
"""Height and width that leave more than one number of each map to the last stage, for BatchNorm."""

SMALLEST_SMALL = 9
"""The same without the first two halvings."""


@part("mobilenet")
def mobilenet(
    shape: tuple[int, ...], outputs: int, width: float = 1.0, dropout: float = 0.2, stem: str = "auto"
) -> nn.Module:
    """Build MobileNetV2: inverted residuals with depthwise convolutions.

    On 3 x 224 x 224 with 1000 outputs it has 3,504,872 parameters (the paper's 3.4 million, table 4), named
    as torchvision's and initialised as those.

    Sandler, Howard, Zhu, Zhmoginov, Chen 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks".

    Args:
        shape: of one image: (channels, height, width) or (height, width), at least 9 x 9; with the large
            stem 33 x 33.
        outputs: size of the last layer.
        width: factor of the number of maps of all layers; rounded to multiples of 8.
        dropout: probability with which each input of the last layer is dropped in training.
        stem: "large": the first convolution and the second stage halve the image; "small": they leave its
            size, for images such as CIFAR's; "auto": small where a side is below 64 pixels.

    Raises:
        BadModel: the inputs are no images, or too small.
        BadOption, UnknownName: an option's value cannot be used.
    """
    small = is_small(stem, shape)
    channels, _, _ = image_size("mobilenet", shape, SMALLEST_SMALL if small else SMALLEST)
    if not isinstance(width, int | float) or isinstance(width, bool) or not 0 < width < float("inf"):
        raise BadOption(f"option 'width' is {width!r}; give a number above 0, such as 0.75")
    inputs = in_eights(32 * width)
    features: list[nn.Module] = [normed_convolution(channels, inputs, 3, stride=1 if small else 2)]
    for number, (expansion, maps, count, stride) in enumerate(STAGES):
        for position in range(count):
            halves = position == 0 and not (small and number == 1)
            features.append(
                InvertedResidual(inputs, in_eights(maps * width), expansion, stride if halves else 1)
            )
            inputs = in_eights(maps * width)
    last = in_eights(1280 * max(1.0, width))
    features.append(normed_convolution(inputs, last, 1))
    layers: dict[str, nn.Module] = {
        "maps": as_maps(shape),
        "features": nn.Sequential(*features),
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "classifier": nn.Sequential(nn.Dropout(share("dropout", dropout)), nn.Linear(last, outputs)),
    }
    network = nn.Sequential(OrderedDict(layers))
    draw_convolutions(network)
    draw_dense(network, deviation=0.01)
    return network


class InvertedResidual(nn.Module):
    """A 1 x 1 convolution to more maps, a depthwise one, and a linear one to few maps: figure 4d."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([normed_convolution(inputs, inner, 1)] if expansion > 1 else []),
            normed_convolution(inner, inner, 3, stride, groups=inner),
            nn.Conv2d(inner, outputs, kernel_size=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, of shape (n, channels, height, width)."""
        outputs: Tensor = self.conv(inputs)
        return inputs + outputs if self.adds else outputs


def normed_convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """Build a convolution with BatchNorm and ReLU6."""
    padding = (size - 1) // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


def in_eights(maps: float) -> int:
    """Round to a multiple of 8, at least 8, and at most a tenth below `maps`."""
    rounded = max(8, int(maps + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * maps else rounded + 8
