"""Residual networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from typing_extensions import override

from tutti.models.fitting import as_maps, draw_convolutions, image_size, is_small
from tutti.registry import part

MAPS = (64, 128, 256, 512)
"""Maps of the 3 x 3 convolutions, by stage."""

SMALLEST = 33
"""Height and width that leave more than one number of each map to the last stage, for BatchNorm."""

SMALLEST_SMALL = 9
"""The same without the first two halvings."""


@part("resnet18")
def resnet18(shape: tuple[int, ...], outputs: int, stem: str = "auto") -> nn.Module:
    """Build the residual network of 18 layers. Its option and errors are those of `resnet`."""
    return resnet("resnet18", PlainBlock, (2, 2, 2, 2), shape, outputs, stem)


@part("resnet50")
def resnet50(shape: tuple[int, ...], outputs: int, stem: str = "auto") -> nn.Module:
    """Build the residual network of 50 layers. Its option and errors are those of `resnet`."""
    return resnet("resnet50", BottleneckBlock, (3, 4, 6, 3), shape, outputs, stem)


class ResidualBlock(nn.Module):
    """Convolutions whose outputs are added to their inputs; the parts are named as torchvision's.

    The outputs have `maps * expansion` channels; stride 2 halves height and width.
    """

    expansion = 1

    def __init__(self, inputs: int, maps: int, stride: int) -> None:
        super().__init__()
        outputs = maps * self.expansion
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def residual(self, inputs: Tensor) -> Tensor:
        """Return the residual to add to the inputs, of shape (n, channels, height, width)."""
        raise NotImplementedError

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, of shape (n, channels, height, width)."""
        return cast("Tensor", self.relu(self.residual(inputs) + self.downsample(inputs)))


class PlainBlock(ResidualBlock):
    """Two 3 x 3 convolutions: figure 5, left."""

    def __init__(self, inputs: int, maps: int, stride: int) -> None:
        super().__init__(inputs, maps, stride)
        self.conv1 = nn.Conv2d(inputs, maps, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(maps)
        self.conv2 = nn.Conv2d(maps, maps, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(maps)

    @override
    def residual(self, inputs: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(inputs)))
        return cast("Tensor", self.bn2(self.conv2(inner)))


class BottleneckBlock(ResidualBlock):
    """A 3 x 3 convolution between two of 1 x 1 (figure 5, right); the 3 x 3 one halves the maps."""

    expansion = 4

    def __init__(self, inputs: int, maps: int, stride: int) -> None:
        super().__init__(inputs, maps, stride)
        self.conv1 = nn.Conv2d(inputs, maps, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(maps)
        self.conv2 = nn.Conv2d(maps, maps, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(maps)
        self.conv3 = nn.Conv2d(maps, maps * self.expansion, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(maps * self.expansion)

    @override
    def residual(self, inputs: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(inputs)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        return cast("Tensor", self.bn3(self.conv3(inner)))


def resnet(
    name: str,
    block: type[ResidualBlock],
    depths: Sequence[int],
    shape: tuple[int, ...],
    outputs: int,
    stem: str,
) -> nn.Module:
    """Build four stages of residual blocks, and one dense layer on the averaged maps.

    He, Zhang, Ren, Sun 2016, "Deep Residual Learning for Image Recognition", table 1 and section 3.4 (with
    projections where shapes differ, option B). On 3 x 224 x 224 with 1000 outputs resnet18 has 11,689,512
    parameters and resnet50 has 25,557,032, as torchvision's, by whose names theirs go. Initialised as those.

    Args:
        name: of the model.
        block: the kind of the blocks.
        depths: how many of them each stage has.
        shape: of one image: (channels, height, width) or (height, width), at least 9 x 9; with the large
            stem 33 x 33.
        outputs: size of the last layer.
        stem: "large": a 7 x 7 convolution and a maximum pooling, each of which halves the image; "small": a
            3 x 3 convolution that leaves its size, for images such as CIFAR's; "auto": small where a side
            is below 64 pixels.

    Raises:
        BadModel: the inputs are no images, or too small.
        UnknownName: an unknown stem.
    """
    small = is_small(stem, shape)
    channels, _, _ = image_size(name, shape, SMALLEST_SMALL if small else SMALLEST)
    layers: dict[str, nn.Module] = {
        "maps": as_maps(shape),
        "conv1": (
            nn.Conv2d(channels, MAPS[0], kernel_size=3, padding=1, bias=False)
            if small
            else nn.Conv2d(channels, MAPS[0], kernel_size=7, stride=2, padding=3, bias=False)
        ),
        "bn1": nn.BatchNorm2d(MAPS[0]),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1),
    }
    inputs = MAPS[0]
    for number, (maps, depth) in enumerate(zip(MAPS, depths, strict=True), start=1):
        blocks = []
        for position in range(depth):
            blocks.append(block(inputs, maps, stride=2 if number > 1 and position == 0 else 1))
            inputs = maps * block.expansion
        layers[f"layer{number}"] = nn.Sequential(*blocks)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(inputs, outputs)}
    network = nn.Sequential(OrderedDict(layers))
    draw_convolutions(network)
    return network
