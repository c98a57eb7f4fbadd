"""Transforms of training batches, a file for each: random changes that samples are trained with.

A transform is a function of a whole batch, `(inputs, targets, random) -> (inputs, targets)`. What `random`
gives a sample depends on the seed, the epoch and the sample alone: any number of ranks, any strategy and a
run that is resumed train with the same tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from scipy import special
from torch import Tensor
from torch.nn import functional

from tutti.data.columns import Inputs
from tutti.data.parts import Part
from tutti.data.sampling import found_at
from tutti.errors import BadData, BadOption, UnknownName
from tutti.registry import Registry
from tutti.training.sample_words import Words, keys_of, mix, steps, word

Transform: TypeAlias = Callable[[Any, Tensor, "SampleRandom"], tuple[Any, Tensor]]

AUGMENTATIONS: Final[Registry[Callable[..., tuple[Tensor, Tensor]]]] = Registry(
    "tutti.training.augmentations", "augmentation", "A transform of your own is 'file.py:function'."
)
"""The built-in transforms; each may have one option, its last parameter."""

_USE: Final = 2
"""Tells these random numbers from those of dropout."""


class SampleRandom:
    """Random numbers for the samples of a batch, each by itself: see the methods."""

    def __init__(
        self,
        keys: Words,
        device: torch.device,
        classes: int | None = None,
        pick: Callable[[Tensor], tuple[Inputs, Tensor]] | None = None,
        count: int = 0,
        cumulated: Tensor | None = None,
    ) -> None:
        self._keys, self._device, self._draws = keys, device, 0
        self._classes, self._pick, self._count = classes, pick, count
        self._cumulated = cumulated

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers of 24 bits from 0 to below 1, of shape (samples, *shape), float32."""
        found = (self._words(shape) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return torch.from_numpy(found).to(self._device)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Draw whole numbers from 0 to below `below`, at most 2**32, of shape (samples, *shape), int64."""
        found = (self._words(shape) >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)
        return torch.from_numpy(found.astype(np.int64)).to(self._device)

    def beta(self, alpha: float) -> Tensor:
        """Draw numbers from Beta(alpha, alpha), of shape (samples,), float32."""
        found = special.betaincinv(alpha, alpha, self.uniform().cpu().double().numpy())
        return torch.from_numpy(found.astype(np.float32)).to(self._device)

    def others(self) -> tuple[Inputs, Tensor]:
        """Draw another sample of the data for each, with its targets; by the weights of `--sampling`."""
        assert self._pick is not None, "a batch of data has others"
        if self._cumulated is None:
            return self._pick(self.integers(self._count))
        return self._pick(found_at(self._cumulated, self.integers(1 << 32).double().cpu() / (1 << 32)))

    def shares(self, targets: Tensor) -> Tensor:
        """Return class numbers as shares of the classes, of shape (samples, classes, ...); floats stay."""
        if self._classes is None or targets.is_floating_point():
            return targets
        found = functional.one_hot(targets, self._classes).movedim(-1, 1)
        return found.to(torch.get_default_dtype())

    def _words(self, shape: Sequence[int]) -> Words:
        self._draws += 1
        begin = self._keys + word(self._draws)
        return mix(begin[:, None] + steps(math.prod(shape))).reshape(len(begin), *shape)


class Augmentation:
    """The transforms of a run's training batches, one after the other.

    Args:
        spec: names with commas, each in `AUGMENTATIONS`, package.module:function or file.py:function; or
            functions.
        options: of the built-in transforms, by their names.
        part: the samples that are trained on.
        seed: of the run.
        classes: their number; None: the targets are floats.
        chances: weights of the samples, by which epochs draw them; None: each is taken once.

    Attributes:
        example: the targets of a few samples, as they become.

    Raises:
        UnknownName, BadOption: there is no such transform, or no such option.
        BadData: a transform is for other inputs.
    """

    def __init__(
        self,
        spec: str | Transform | Sequence[str | Transform],
        options: Mapping[str, Any],
        part: Part,
        seed: int,
        classes: int | None = None,
        chances: Tensor | None = None,
    ) -> None:
        self._cumulated = None if chances is None else chances.cumsum(0)
        self._seed, self._transforms = seed, _transforms(spec, options)
        self._part, self._classes = part, classes
        few = torch.arange(min(2, len(part)))
        (inputs, targets), (others, self.example) = part.take(few), self(0, few, *part.take(few))
        kinds = [_kinds(inputs), _kinds(targets)], [_kinds(others), _kinds(self.example)]
        if classes is not None and self.example.shape[:2] == (len(few), classes):
            kinds[1][1] = kinds[0][1]  # Mixed samples have shares of the classes.
        if kinds[0] != kinds[1]:
            raise BadOption(
                f"--augment makes a batch of {kinds[0]} into {kinds[1]}; a transform must leave shapes and "
                "types as they are"
            )

    def __call__(self, epoch: int, samples: Tensor, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        """Transform the samples of these numbers in an epoch (from 0); they may be changed in place."""
        return self._changed(epoch, samples.cpu(), inputs, targets, len(self._transforms), _USE)

    def _changed(
        self, epoch: int, samples: Tensor, inputs: Inputs, targets: Tensor, stop: int, use: int
    ) -> tuple[Inputs, Tensor]:
        """Apply the first `stop` transforms, with random numbers of some use."""
        for at, transform in enumerate(self._transforms[:stop]):
            # Others that a sample is mixed with are changed by that sample's numbers, too.
            pick = partial(self._picked, epoch, samples, at, use + len(self._transforms) * (at + 1))
            keys = keys_of(samples, self._seed, epoch, use + at)
            kept = self._classes, pick, len(self._part), self._cumulated
            random = SampleRandom(keys, targets.device, *kept)
            found = transform(inputs, targets, random)
            if not isinstance(found, tuple) or len(found) != 2:
                raise BadOption(
                    f"a transform of --augment returns a {type(found).__name__}; it must return a pair, "
                    "(inputs, targets)"
                )
            inputs, targets = found
        return inputs, targets

    def _picked(
        self, epoch: int, samples: Tensor, stop: int, use: int, numbers: Tensor
    ) -> tuple[Inputs, Tensor]:
        return self._changed(epoch, samples, *self._part.take(numbers), stop, use)


def refuse_no_images(inputs: Inputs, name: str) -> None:
    """Refuse inputs that are no images, of shape (samples, channels, height, width).

    Raises:
        BadData: the message names the transform.
    """
    if not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise BadData(
            f"--augment {name} is for images, of shape (channels, height, width), and the inputs are "
            f"{_kinds(inputs)}, samples first; leave it out"
        )


def _kinds(values: object) -> str:
    """Describe tensors by their shapes and types."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name}: {_kinds(one)}" for name, one in values.items())
    if isinstance(values, tuple):
        return ", ".join(map(_kinds, values))
    if not isinstance(values, Tensor):
        return type(values).__name__
    return f"{tuple(values.shape)} {str(values.dtype).removeprefix('torch.')}"


def _transforms(
    spec: str | Transform | Sequence[str | Transform], options: Mapping[str, Any]
) -> list[Transform]:
    given: Sequence[str | Transform] = [spec] if callable(spec) else spec
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    names = [one for one in given if isinstance(one, str)]
    for key in options:
        if key not in names:
            raise UnknownName("option", key, names, of="--augment")
    found: list[Transform] = []
    for one in given:
        function: object = AUGMENTATIONS.load(one) if isinstance(one, str) else one
        if not callable(function):
            raise BadOption(f"--augment names '{one}', which is a {type(function).__name__}, not a function")
        if isinstance(one, str) and one in options:
            parameter = list(inspect.signature(function).parameters)[-1]
            function = partial(function, **{parameter: options[one]})
        found.append(cast("Transform", function))
    return found
