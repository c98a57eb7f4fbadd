"""Shapes of the inputs of one sample: of one input, or of several."""

from __future__ import annotations

from typing import TypeAlias, cast

Shape: TypeAlias = "tuple[int, ...] | dict[str, tuple[int, ...]] | tuple[tuple[int, ...], ...]"
"""The shape of one input, such as (1, 28, 28); of each by name; or of each by position."""


def several(shape: Shape) -> bool:
    """Return whether a shape has several inputs."""
    return isinstance(shape, dict) or any(isinstance(one, tuple) for one in shape)


def described(shape: Shape) -> str:
    """Describe the shape of one input, such as 1x28x28, or of several, such as image 1x28x28 and age 1."""
    if isinstance(shape, dict):
        return " and ".join(f"{name} {described(one)}" for name, one in shape.items())
    if several(shape):
        return " and ".join(map(described, cast("tuple[Shape, ...]", shape)))
    return "x".join(map(str, shape)) or "1"
