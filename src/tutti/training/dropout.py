"""Dropout drawn by sample: the numbers that a layer drops depend on the sample, not on the rank or the batch.

    row = mix(random(seed, epoch) + random(layer, call) + GOLDEN * 2**32 * sample + random(dim) * place + ...)
    word = mix(row + GOLDEN * element)
    a number is dropped if its word < p * 2**32

Any number of ranks draws what one process draws. This holds on a CPU for torch's Dropout, Dropout1d,
Dropout2d and Dropout3d, if the first dimension of their inputs is the samples of the pass. Other layers and
`torch.nn.functional.dropout` draw from the rank's generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from tutti.training.sample_words import Words, keys_of, mix, steps, word

_BLOCK: Final = 1 << 14
"""Words that are mixed at once, so that they stay in the cache."""

_USE: Final = 1
"""Separates these words from those of augmentations."""

_PLACES: Final = 2
"""Separates the words of places from other words."""

_CHANNELS: Final = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""Layers that drop whole channels, and the dimensions of their inputs with samples first."""

_LAYERS: Final = (nn.Dropout, *_CHANNELS)


class SampleMasks:
    """The masks of a pass, by sample."""

    def __init__(self, seed: int) -> None:
        self._seed, self._epoch = seed, 0
        self._samples: Tensor | None = None
        self._keys: Words | None = None
        self._calls: dict[tuple[str, int], int] = {}
        self._called: Counter[str] = Counter()

    def begin(self, epoch: int, samples: Tensor | None) -> None:
        """Begin a pass of an epoch (from 0) on samples with these numbers, int64; None: they have none."""
        self._epoch, self._samples, self._keys = epoch, samples, None
        self._calls.clear()
        self._called.clear()

    def draw(self, layer: str, shape: Sequence[int], p: float) -> Tensor | None:
        """Draw the numbers of a shape to keep; None unless the samples of this pass come first in it."""
        samples = self._samples
        if samples is None or shape[0] != len(samples) or not samples.is_cpu:
            return None
        if self._keys is None:
            self._keys = keys_of(samples, self._seed, self._epoch, _USE)
        keys = _of_rows(self._keys + word(*layer.encode(), self._call(layer)), shape[1:-1])[:, None]
        each = shape[-1] if len(shape) > 1 else 1
        pairs = steps(-(-each // 2))
        kept, rows = np.empty((len(keys), each), dtype=np.bool_), max(1, _BLOCK // max(1, len(pairs)))
        for start in range(0, len(keys), rows):
            # Two numbers of 32 bits each.
            words = mix(keys[start : start + rows] + pairs).view(np.uint32)
            np.greater_equal(words[:, :each], round(p * 2**32), out=kept[start : start + rows])
        return torch.from_numpy(kept).view(*shape)

    def _call(self, layer: str) -> int:
        """Return the number of earlier calls of the layer in this pass.

        `torch.utils.checkpoint` recomputes a layer in the backward pass with torch's generator in its first
        state: an equal number from it means the same call.
        """
        drawn = layer, int(torch.empty((), dtype=torch.int64).random_())
        if drawn not in self._calls:
            self._calls[drawn] = self._called[layer]
            self._called[layer] += 1
        return self._calls[drawn]


def _of_rows(keys: Words, sizes: Sequence[int]) -> Words:
    """Return the first word of each row; they do not depend on the padding of sequences."""
    for dim, size in enumerate(sizes):
        keys = (keys[:, None] + np.arange(size, dtype=np.uint64) * word(_PLACES, dim)).reshape(-1)
    return mix(keys) if sizes else keys


class SampleDropout:
    """The forward pass of a dropout layer of torch, drawn by sample."""

    def __init__(self, layer: Any, name: str, masks: SampleMasks) -> None:
        self._layer, self._name, self._masks = layer, name, masks

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the layer."""
        layer, p = self._layer, self._layer.p
        kept = self._draw(inputs, p) if layer.training and 0 < p < 1 else None
        if kept is None:
            return cast("Tensor", type(layer).forward(layer, inputs))
        # As the inputs lie in memory, so that the product does too.
        laid = inputs if kept.shape == inputs.shape else kept
        noise = torch.empty_like(laid, dtype=inputs.dtype).copy_(kept).mul_(1 / (1 - p))
        return inputs.mul_(noise) if layer.inplace else inputs * noise

    def _draw(self, inputs: Tensor, p: float) -> Tensor | None:
        transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        dims = _CHANNELS.get(type(self._layer))
        batched = inputs.dim() > 0 if dims is None else inputs.dim() == dims
        if type(inputs) is not Tensor or not inputs.is_cpu or transformed or not batched:
            return None
        if dims is None:
            return self._masks.draw(self._name, inputs.shape, p)
        kept = self._masks.draw(self._name, inputs.shape[:2], p)
        return None if kept is None else kept.view(*kept.shape, *[1] * (dims - 2))


@contextmanager
def drawn_by_sample(module: nn.Module, seed: int) -> Iterator[SampleMasks]:
    """Make the dropout layers of a model draw by sample inside the block; each pass must `begin`."""
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) in _LAYERS and "forward" not in vars(layer)
    }
    masks = SampleMasks(seed)
    for name, layer in layers.items():
        layer.forward = SampleDropout(layer, name, masks)
    try:
        yield masks
    finally:
        for layer in layers.values():
            del layer.forward
