"""A checksum of tensors: exact, as each changed bit changes it, and as fast as memory is read."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

WORD: Final = 8
"""The bytes that are added up at a time."""

STRETCH: Final = 1 << 14
"""Words whose products are in the cache when they are added up."""

FACTOR: Final = 0x9E3779B97F4A7C15
"""What a sum is multiplied by before the next one is added: odd, so that nothing is lost."""

_ODD: Final = np.arange(1, 2 * STRETCH, 2, dtype=np.uint64)
MODULUS: Final = 1 << 64


def checksum(values: Tensor) -> int:
    """Return a checksum of the bits of a tensor in the CPU's memory, 0 to 2^64 - 1.

        s = sum over i of (2 i + 1) word_i   mod 2^64

    over each stretch of words of 64 bits, and these sums in the same way by powers of an odd factor. A
    flipped bit changes a word by a power of two below 2^64, which no odd factor makes a multiple of 2^64.
    """
    content = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    whole = len(content) // WORD * WORD
    words, total = content[:whole].view(np.uint64), len(content)
    for start in range(0, len(words), STRETCH):
        part = words[start : start + STRETCH]
        total = (total * FACTOR + int((part * _ODD[: len(part)]).sum())) % MODULUS
    return (total * FACTOR + int.from_bytes(content[whole:].tobytes(), "little")) % MODULUS
