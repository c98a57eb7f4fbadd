"""An open data set: parts in memory, and the scale from stored numbers to model inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

PIXEL_MAX = 255.0
"""The divisor of uint8 inputs, so that means and deviations are those of pixels between 0 and 1."""


@dataclass(frozen=True)
class Scale:
    """The map from stored inputs to the model's: (x / 255 - mean) / std in float32, or x itself.

    Attributes:
        mean: of x / 255, one value for all or one per channel (dimension 1); empty: inputs stay as they are.
        std: the standard deviation likewise.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @cached_property
    def _line(self) -> tuple[Tensor, Tensor, float]:
        """Factor and offset of each channel, and the first factor as a number."""
        mean, std = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        factor, offset = (1 / (PIXEL_MAX * std)).float(), (-mean / std).float()
        return factor, offset, factor[0].item()

    def apply(self, stored: Tensor) -> Tensor:
        """Return the model's inputs for `stored`, of the same shape; float32 if there is a scale."""
        if not self.mean:
            return stored
        seen, (factor, offset, first) = stored.to(torch.float32, copy=True), self._line
        if len(self.mean) == 1:
            # One vectorised sweep over the fresh copy: offset + factor * x.
            return torch.add(offset, seen, alpha=first, out=seen)
        per_channel = (1, -1) + (1,) * (stored.dim() - 2)
        return seen.mul_(factor.view(per_channel)).add_(offset.view(per_channel))

    def on(self, device: str) -> Scale:
        """Copy the scale for inputs in the memory of a device."""
        moved = Scale(self.mean, self.std)
        if self.mean:
            factor, offset, first = self._line
            vars(moved)["_line"] = factor.to(device), offset.to(device), first
        return moved


@dataclass(frozen=True)
class Part:
    """One part of a data set. All ranks of the host see the same memory: do not write to it.

    Attributes:
        inputs: of shape (samples, ...); images are (samples, channels, height, width), uint8 as stored.
        targets: class numbers, int64, of shape (samples,), or (samples, ...) where each position has one; or
            float values of shape (samples, ...).
        scale: turns stored inputs into the model's.
    """

    inputs: Tensor
    targets: Tensor
    scale: Scale = field(default_factory=Scale)

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the inputs, as the model sees them, and the targets of some samples.

        Args:
            indices: positions in this part, of shape (count,), int64.
        """
        indices = indices.to(self.device)
        inputs = self.scale.apply(self.inputs.index_select(0, indices))
        return inputs, self.targets.index_select(0, indices)

    @property
    def device(self) -> torch.device:
        """The memory that holds the samples."""
        return self.inputs.device

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes."""
        return self.inputs.nbytes + self.targets.nbytes

    def on(self, device: str) -> Part:
        """Copy it to the memory of a device, such as "cuda"."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return replace(self, inputs=inputs, targets=targets, scale=self.scale.on(device))


@dataclass(frozen=True)
class DataSet:
    """A data set in memory. Made by `open_data`.

    Attributes:
        name: for people to read.
        train: the samples to train on.
        validation: kept aside from the training samples, to watch the training; None when its share is 0.
        test: for the final figure only; None when the source has none.
        classes: the number of classes; None when the targets are floats.
        labels: the classes' names; empty when unknown.
    """

    name: str
    train: Part
    validation: Part | None
    test: Part | None
    classes: int | None
    labels: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input as the model sees it, such as (1, 28, 28)."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def parts(self) -> list[Part]:
        """The parts that there are: train, validation, test."""
        return [part for part in (self.train, self.validation, self.test) if part is not None]

    @property
    def nbytes(self) -> int:
        """The memory that its parts take, in bytes."""
        return sum(part.nbytes for part in self.parts)

    def with_parts(self, change: Callable[[Part], Part]) -> DataSet:
        """Return it with each part changed, in the order of `parts`."""
        train = change(self.train)
        validation, test = (None if part is None else change(part) for part in (self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test)

    def on(self, device: str) -> DataSet:
        """Copy it to the memory of a device, such as "cuda"."""
        return self.with_parts(lambda part: part.on(device))
