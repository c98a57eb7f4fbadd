"""Random changes of the training samples, a function for each.

A transform is a function of a whole batch, `(inputs, targets, random) -> (inputs, targets)`. The numbers that
`random` gives a sample depend on the seed, the epoch and the sample alone: any number of ranks, any strategy
and a resumed run train with the same tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from tutti import parts
from tutti.data.columns import Inputs
from tutti.data.parts import Part
from tutti.errors import BadData, BadOption, UnknownName
from tutti.registry import Registry
from tutti.training.sample_words import Words, keys_of, mix, steps, word

Transform: TypeAlias = Callable[[Any, Tensor, "SampleRandom"], tuple[Any, Tensor]]

AUGMENTATIONS: Final[Registry[Callable[..., tuple[Tensor, Tensor]]]] = parts.AUGMENTATIONS
"""The built-in transforms; each may have one option, its last parameter."""

_USE: Final = 2
"""Separates these random numbers from those of dropout."""


class SampleRandom:
    """Random numbers for each sample of a batch."""

    def __init__(self, keys: Words, device: torch.device) -> None:
        self._keys, self._device, self._draws = keys, device, 0

    def uniform(self, *shape: int) -> Tensor:
        """Draw float32 numbers of 24 bits from 0 to below 1, of shape (samples, *shape)."""
        found = (self._words(shape) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return torch.from_numpy(found).to(self._device)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Draw int64 numbers from 0 to below `below`, at most 2**32, of shape (samples, *shape)."""
        found = (self._words(shape) >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)
        return torch.from_numpy(found.astype(np.int64)).to(self._device)

    def _words(self, shape: Sequence[int]) -> Words:
        self._draws += 1
        begin = self._keys + word(self._draws)
        return mix(begin[:, None] + steps(math.prod(shape))).reshape(len(begin), *shape)


class Augmentation:
    """The transforms of a run's training batches, one after the other.

    `spec` has functions, or comma-separated names, each in `AUGMENTATIONS`, package.module:function or
    file.py:function; `options` are by the name of a built-in transform. They are tried on two samples, and
    raise UnknownName, BadOption or BadData if they do not fit.
    """

    def __init__(
        self,
        spec: str | Transform | Sequence[str | Transform],
        options: Mapping[str, Any],
        part: Part,
        seed: int,
    ) -> None:
        self._seed, self._transforms = seed, _transforms(spec, options)
        few = torch.arange(min(2, len(part)))
        before, after = ([*map(described, pair)] for pair in (part.take(few), self(0, few, *part.take(few))))
        if before != after:
            raise BadOption(
                f"--augment makes a batch of {before} into {after}; a transform must leave shapes and types "
                "as they are"
            )

    def __call__(self, epoch: int, samples: Tensor, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        """Transform the samples of these numbers in an epoch (from 0); they may be changed in place."""
        for at, transform in enumerate(self._transforms):
            keys = keys_of(samples.cpu(), self._seed, epoch, _USE + at)
            pair = transform(inputs, targets, SampleRandom(keys, targets.device))
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise BadOption(
                    f"a transform of --augment returns a {type(pair).__name__}; it must return a pair, "
                    "(inputs, targets)"
                )
            inputs, targets = pair
        return inputs, targets


def refuse_no_images(inputs: Inputs, name: str) -> None:
    """Raise BadData unless inputs are images, of shape (samples, channels, height, width)."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise BadData(
            f"--augment {name} is for images, of shape (channels, height, width), and the inputs are "
            f"{described(inputs)}, samples first; leave it out"
        )


def described(values: object) -> str:
    """Describe tensors by their shapes and types."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name}: {described(one)}" for name, one in values.items())
    if isinstance(values, tuple):
        return ", ".join(map(described, values))
    if not isinstance(values, Tensor):
        return type(values).__name__
    return f"{tuple(values.shape)} {str(values.dtype).removeprefix('torch.')}"


def _transforms(
    spec: str | Transform | Sequence[str | Transform], options: Mapping[str, Any]
) -> list[Transform]:
    several: Sequence[str | Transform] = [spec] if callable(spec) else spec
    if isinstance(several, str):
        several = [name.strip() for name in several.split(",") if name.strip()]
    names = [one for one in several if isinstance(one, str)]
    for key in options:
        if key not in names:
            raise UnknownName("option", key, names, of="--augment")
    transforms: list[Transform] = []
    for one in several:
        function: object = AUGMENTATIONS.load(one) if isinstance(one, str) else one
        if not callable(function):
            raise BadOption(f"--augment names '{one}', which is a {type(function).__name__}, not a function")
        if isinstance(one, str) and one in options:
            parameter = list(inspect.signature(function).parameters)[-1]
            function = partial(function, **{parameter: options[one]})
        transforms.append(cast("Transform", function))
    return transforms
