"""The C library's handling of freed memory: it keeps it, as the next step needs as much.

Left alone, glibc returns the memory of large tensors to the kernel when they are freed, and asks for it again
a moment later: each step of training then pays for clearing and mapping the same pages anew.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
LARGE: Final = 64 << 20
"""Bytes from which on memory goes back to the kernel all the same: a data set, not a layer's outputs."""

PAD: Final = 64 << 20
"""Bytes by which the heap grows at the least."""


def keep_memory() -> bool:
    """Have this process keep what it frees, unless the user's environment says how to allocate.

    Returns:
        Whether it does from now on; not where the C library is none of GNU's.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Only the largest tensors get pages of their own, the heap never shrinks, and it grows in large pieces.
    wishes = ((_MMAP_THRESHOLD, LARGE), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, PAD))
    results = [mallopt(what, value) for what, value in wishes]
    return all(result == 1 for result in results)


def give_back_memory() -> None:
    """Return to the kernel what this process has freed: after something that it does once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
