"""GoogLeNet."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.models.fitting import as_maps, flag, image_size, is_small, share
from tutti.registry import part

MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Maps of the inception modules: 1 x 1; 3 x 3 reduced, 3 x 3; 5 x 5 reduced, 5 x 5; pooled (table 1)."""

SMALLEST = 33
"""Height and width that leave more than one number of each map to the last modules, for BatchNorm."""

SMALLEST_SMALL = 9
"""The same without the first two halvings."""


@part("googlenet")
def googlenet(
    shape: tuple[int, ...], outputs: int, batch_norm: bool = True, dropout: float = 0.4, stem: str = "auto"
) -> nn.Module:
    """Build GoogLeNet: nine inception modules, without the auxiliary classifiers.

    On 3 x 224 x 224 with 1000 outputs and without BatchNorm it has the 6,998,552 parameters of BVLC's Caffe
    model, without its auxiliary classifiers.

    Szegedy et al. 2015, "Going Deeper with Convolutions", table 1; Ioffe, Szegedy 2015, "Batch
    Normalization". Initialised as BVLC's Caffe model (Glorot and Bengio's weights), with biases of 0.

    Args:
        shape: of one image: (channels, height, width) or (height, width), at least 9 x 9; with the large
            stem 33 x 33.
        outputs: size of the last layer.
        batch_norm: whether BatchNorm follows each convolution, in place of its bias. The paper has none, but
            local response normalisation in the stem.
        dropout: probability with which each input of the last layer is dropped in training.
        stem: "large": a 7 x 7 convolution and a maximum pooling, each of which halves the image; "small": a
            3 x 3 convolution that leaves its size, for images such as CIFAR's; "auto": small where a side
            is below 64 pixels.

    Raises:
        BadModel: the inputs are no images, or too small.
        BadOption, UnknownName: an option's value cannot be used.
    """
    small = is_small(stem, shape)
    channels, _, _ = image_size("googlenet", shape, SMALLEST_SMALL if small else SMALLEST)
    normed = flag("batch_norm", batch_norm)
    first = (channels, 64, 3, normed) if small else (channels, 64, 7, normed, 2)
    layers: dict[str, nn.Module] = {
        "maps": as_maps(shape),
        "conv1": rectified_convolution(*first),
        "pool1": nn.Identity() if small else halving(),
        "norm1": nn.Identity() if normed else nn.LocalResponseNorm(5),
        "conv2": rectified_convolution(64, 64, 1, normed),
        "conv3": rectified_convolution(64, 192, 3, normed),
        "norm2": nn.Identity() if normed else nn.LocalResponseNorm(5),
        "pool2": halving(),
    }
    inputs = 192
    for name, maps in MODULES.items():
        if name in ("4a", "5a"):
            layers[f"pool{int(name[0]) - 1}"] = halving()
        layers[f"inception{name}"] = module = Inception(inputs, maps, normed)
        inputs = module.outputs
    layers |= {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "dropout": nn.Dropout(share("dropout", dropout)),
        "fc": nn.Linear(inputs, outputs),
    }
    network = nn.Sequential(OrderedDict(layers))
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


class Inception(nn.Module):
    """Convolutions of three sizes and a pooling over the same inputs, their maps side by side: figure 2b."""

    def __init__(self, inputs: int, maps: tuple[int, int, int, int, int, int], normed: bool) -> None:
        super().__init__()
        one, reduced3, three, reduced5, five, pooled = maps
        self.outputs = one + three + five + pooled
        self.branches = nn.ModuleList(
            [
                rectified_convolution(inputs, one, 1, normed),
                nn.Sequential(
                    rectified_convolution(inputs, reduced3, 1, normed),
                    rectified_convolution(reduced3, three, 3, normed),
                ),
                nn.Sequential(
                    rectified_convolution(inputs, reduced5, 1, normed),
                    rectified_convolution(reduced5, five, 5, normed),
                ),
                nn.Sequential(
                    nn.MaxPool2d(3, stride=1, padding=1), rectified_convolution(inputs, pooled, 1, normed)
                ),
            ]
        )

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the maps of all branches, of shape (n, channels, height, width)."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


def rectified_convolution(inputs: int, outputs: int, size: int, normed: bool, stride: int = 1) -> nn.Module:
    """Build a convolution with ReLU, and BatchNorm between them if `normed`."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=not normed)
    norm = [nn.BatchNorm2d(outputs)] if normed else []
    return nn.Sequential(convolution, *norm, nn.ReLU(inplace=True))


def halving() -> nn.Module:
    """Build the maximum pooling that halves height and width, rounded up."""
    return nn.MaxPool2d(3, stride=2, padding=1)
