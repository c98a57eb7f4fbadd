"""Models for the tests, beside the built-in ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.past = nn.Conv2d(channels, outputs, 1) if channels != outputs else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.second(functional.relu(self.norm(self.first(inputs))))
        outputs += self.past(inputs)
        return functional.relu(outputs)


class ResidualNet(nn.Module):
    """Skip connections inside blocks, and a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, stride=2)
        self.blocks = nn.ModuleList([Residual(4, 4), Residual(4, 6), Residual(6, 6), Residual(6, 6)])
        self.head = nn.Linear(6, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, scale: float = 0.5) -> Tensor:
        outputs = self.stem(inputs) * scale
        for block in self.blocks:
            outputs = block(outputs)
        return self.head(outputs.mean((2, 3)))


class Encoder(nn.Module):
    """A transformer over the rows of an image, with a token and positions that are bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(14, 8)
        self.token = nn.Parameter(torch.full((1, 1, 8), 0.1))
        self.positions = nn.Parameter(torch.linspace(-1, 1, 15 * 8).view(1, 15, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.embed(inputs.view(-1, 14, 14))
        rows = torch.cat([self.token.expand(rows.size(0), -1, -1), rows], 1) + self.positions
        for layer in self.layers:
            rows = layer(rows * self.scale)
        return self.head(rows[:, 0])


def dropped() -> nn.Module:
    """Dropout of numbers and of whole channels, between layers that are cut."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5, momentum=None),
        nn.Dropout2d(0.3),
        nn.AvgPool2d(2),
        nn.Conv2d(5, 7, 3, padding=1),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(252, 5),
    )


def tied() -> nn.Module:
    """Two layers with one weight; the first layer is frozen."""
    first, second, third = nn.Linear(196, 9), nn.Linear(9, 9), nn.Linear(9, 9)
    first.requires_grad_(False)
    third.weight = second.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), third, nn.Linear(9, 5))


def grouped() -> nn.Module:
    """Has a convolution in groups."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(400, 5))


class Normalised(torch.optim.Optimizer):
    """An optimizer that moves a parameter by the direction of its gradient, of which no rank may have all."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])
