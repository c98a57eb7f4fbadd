"""Models for the tests, beside the built-in ones."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


def normalised() -> nn.Module:
    """Convolutions with BatchNorm, and layers inside layers."""
    block = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1, padding_mode="reflect", bias=False), nn.BatchNorm2d(5)
    )
    return nn.Sequential(
        block,
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(245, 12),
        nn.PReLU(),
        nn.Linear(12, 5),
    )


def layer_normalised() -> nn.Module:
    """A normalisation with weights of its own, of each sample by itself."""
    norm = nn.LayerNorm(12)
    nn.init.uniform_(norm.weight, 2, 3)
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 12), norm, nn.ReLU(), nn.Linear(12, 5))


def tied() -> nn.Module:
    """Two layers with one weight; the first layer is frozen."""
    first, second, third = nn.Linear(196, 9), nn.Linear(9, 9), nn.Linear(9, 9)
    first.requires_grad_(False)
    third.weight = second.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), third, nn.Linear(9, 5))


def recurrent() -> nn.Module:
    """Has a layer that cannot be cut."""
    return nn.Sequential(nn.Flatten(2), nn.Flatten(1), nn.Unflatten(1, (14, 14)), nn.LSTM(14, 8))


def grouped() -> nn.Module:
    """Has a convolution in groups."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(400, 5))


def plan(module: nn.Module) -> dict[str, ParallelStyle]:
    """The first layer cut by its outputs, the second by its inputs, the third whole: for mlp."""
    return {"1": ColwiseParallel(), "3": RowwiseParallel()}


def number(module: nn.Module) -> int:
    """No plan."""
    return 3


def astray(module: nn.Module) -> dict[str, ParallelStyle]:
    """A plan for another model."""
    return {"99": ColwiseParallel()}
