"""Checks that the built-in models share: their options' values, and the size of the input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn

from tutti.errors import BadModel, BadOption, UnknownName

SMALL: Final = 64
"""Images with a side below this number of pixels are small ones."""

STEMS: Final = ("auto", "small", "large")
"""Values of the option 'stem' of networks for photographs."""


def whole_numbers(option: str, value: object) -> list[int]:
    """Return layer sizes: from a whole number, a list of them, or a string such as "256,128"; all above 0."""
    sizes = value.strip("[]() ").replace(",", " ").split() if isinstance(value, str) else value
    parts: list[object] = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    numbers = [int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise BadOption(f"option '{option}' is {value!r}; give whole numbers above 0, such as 256,128")
    return [number for number in numbers if isinstance(number, int)]


def whole_number(option: str, value: object) -> int:
    """Return a whole number above 0, or raise BadOption."""
    numbers = whole_numbers(option, value)
    if len(numbers) != 1:
        raise BadOption(f"option '{option}' is {value!r}; give one whole number above 0, such as 128")
    return numbers[0]


def share(option: str, value: object) -> float:
    """Return a share from 0 to below 1, such as a dropout probability, or raise BadOption."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise BadOption(f"option '{option}' is {value!r}; give a number from 0 to below 1, such as 0.5")
    return float(value)


def flag(option: str, value: object) -> bool:
    """Return True or False, or raise BadOption."""
    if not isinstance(value, bool):
        raise BadOption(f"option '{option}' is {value!r}; give true or false")
    return value


def choice(option: str, value: object, choices: Iterable[str]) -> str:
    """Return one of the `choices`, or raise UnknownName, whose message names the nearest."""
    known = list(choices)
    if value not in known:
        raise UnknownName("value", str(value), known, of=f"the option '{option}'")
    return str(value)


def is_small(stem: object, shape: tuple[int, ...]) -> bool:
    """Return whether a network for photographs leaves out the first two of its five halvings.

    `stem` is the option: "small", "large", or "auto", which is small for images with a side below 64 pixels.
    """
    chosen = choice("stem", stem, STEMS)
    return min(shape[-2:]) < SMALL if chosen == "auto" else chosen == "small"


def as_maps(shape: tuple[int, ...]) -> nn.Module:
    """Build the layer that gives images of shape (height, width) their one channel."""
    return nn.Unflatten(1, (1, shape[0])) if len(shape) == 2 else nn.Identity()


def draw_convolutions(module: nn.Module) -> None:
    """Draw the weights of a network's convolutions for ReLU, by the size of their outputs; biases are 0.

    He et al. 2015, "Delving Deep into Rectifiers", section 2.2, backward case, as torchvision has it.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def draw_dense(module: nn.Module, deviation: float) -> None:
    """Draw the weights of a network's dense layers from a normal distribution; biases are 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=deviation)
            nn.init.zeros_(layer.bias)


def image_size(model: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return the channels, height and width of inputs of `shape`; (height, width) alone has one channel.

    Raise BadModel for inputs that are no images, or smaller than `smallest` x `smallest`.
    """
    if len(shape) not in (2, 3):
        raise BadModel(
            f"model '{model}' takes images of shape (channels, height, width), but the data's inputs have "
            f"shape {tuple(shape)}; use 'tabular' for the columns of a table, else 'mlp'"
        )
    channels, height, width = (1, *shape) if len(shape) == 2 else shape
    if min(height, width) < smallest:
        raise BadModel(
            f"model '{model}' takes images of at least {smallest} x {smallest}, but the data's are "
            f"{height} x {width}; use a smaller model, such as 'mlp'"
        )
    return channels, height, width
