"""Keras models: their inputs, and double precision."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from tutti.data.columns import Inputs
from tutti.errors import BadModel


def arguments(model: nn.Module, inputs: Inputs) -> Inputs:
    """Return the arguments of a Keras model, by position or by name.

    Images, (n, channels, height, width), get their channels last; one with a single channel may lose it, or
    become a vector. Several inputs are one argument, except for a subclass of `keras.Model`, whose inputs are
    not known.
    """
    asked: list[Any] | None = getattr(model, "inputs", None)
    if isinstance(inputs, Tensor):
        return (_as_asked(tuple(asked[0].shape) if asked else None, inputs),)
    if not asked:
        return inputs
    if isinstance(inputs, dict):
        shapes = {one.name: tuple(one.shape) for one in asked}
        one: Any = {name: _as_asked(shapes.get(name), tensor) for name, tensor in inputs.items()}
    else:
        one = [_as_asked(tuple(of.shape), tensor) for of, tensor in zip(asked, inputs, strict=False)]
    return (one,)


def _as_asked(asked: tuple[int | None, ...] | None, inputs: Tensor) -> Tensor:
    images = inputs.dim() == 4
    if asked is None:
        return inputs.movedim(1, 3) if images and _channels_last() else inputs
    if _fits(asked, inputs):
        return inputs
    ways = []
    if images:
        last = inputs.movedim(1, 3)
        ways = [last, last.squeeze(3), last.flatten(1)] if inputs.shape[1] == 1 else [last]
    for way in ways:
        if _fits(asked, way):
            return way
    raise BadModel(
        f"the Keras model takes inputs of shape {asked[1:]}, but the data's have shape "
        f"{tuple(inputs.shape[1:])}{' (or with channels last)' if images else ''}; build it for these"
    )


def prepare(model: nn.Module, double: bool) -> None:
    """Prepare a Keras model for training, in place; with `double` its layers compute in 64 bits."""
    keras: Any = importlib.import_module("keras")
    own: Any = model
    if not own.built:
        raise BadModel(
            "the Keras model has no weights before it knows the shape of its inputs: begin it with "
            "keras.Input(...), or call it once where it is made"
        )
    # Only `fit` of Keras adds the losses of layers.
    regular = [layer.name for layer in own._flatten_layers() if _adds_to_loss(layer)]
    if regular:
        raise BadModel(
            f"layers of the Keras model add to the loss ({', '.join(regular)}), which is not "
            "supported; leave their regularizers out, and give --optimizer.weight_decay"
        )
    if double:
        for layer in own._flatten_layers():
            layer.dtype_policy = keras.DTypePolicy("float64")


def _adds_to_loss(layer: Any) -> bool:
    names = ("kernel", "bias", "beta", "gamma", "embeddings", "activity")
    return any(getattr(layer, f"{name}_regularizer", None) is not None for name in names)


def _fits(asked: tuple[int | None, ...], inputs: Tensor) -> bool:
    own = inputs.shape[1:]
    return len(asked) - 1 == len(own) and all(
        size is None or size == other for size, other in zip(asked[1:], own, strict=True)
    )


def _channels_last() -> bool:
    keras: Any = importlib.import_module("keras")
    return bool(keras.config.image_data_format() == "channels_last")
