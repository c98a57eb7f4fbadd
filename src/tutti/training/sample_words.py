"""Random bits by sample: they depend on the seed, the epoch and the sample, and on no rank or batch.

    word = mix(random(seed, epoch, use) + random(draw) + GOLDEN * (2**32 * sample + element))

Source of `mix`: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Words: TypeAlias = NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_ROW: Final = np.uint64(0x9E3779B97F4A7C15 << 32 & 0xFFFFFFFFFFFFFFFF)
"""Distance from the words of a sample to those of the next one: 2**32 steps."""

_FACTORS: Final = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def keys_of(samples: Tensor, seed: int, epoch: int, use: int) -> Words:
    """Return the first words, of shape (samples,), of samples by their int64 numbers, in an epoch from 0.

    `use` separates the words of dropout from those of augmentations.
    """
    return samples.numpy().astype(np.uint64) * _ROW + word(seed, epoch, use)


def mix(words: Words) -> Words:
    """Mix the bits of each number, in place: numbers that differ in any bit become unrelated."""
    moved = np.empty_like(words)
    for bits, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        np.bitwise_xor(words, np.right_shift(words, np.uint64(bits), out=moved), out=words)
        np.multiply(words, factor, out=words)
    return np.bitwise_xor(words, np.right_shift(words, np.uint64(31), out=moved), out=words)


@lru_cache(maxsize=32)
def steps(count: int) -> Words:
    """Return the distances of the first `count` words of a sample from its key."""
    return np.arange(count, dtype=np.uint64) * _GOLDEN


@cache
def word(*numbers: int) -> np.uint64:
    """Return 64 random bits that depend on `numbers`."""
    return np.uint64(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
