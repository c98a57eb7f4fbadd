"""The C library's handling of freed memory: it keeps it, as the next step needs as much.

Left alone, glibc returns the memory of large tensors to the kernel when they are freed, and asks for it again
a moment later: each step of training then pays for clearing and mapping the same pages anew.

What it keeps must not fall to pieces. torch asks for memory that begins at a multiple of 64 bytes; glibc cuts
off what lies before that, and keeps the piece in a cache of the thread, where it is never joined with its
neighbours again. The next tensor of the same size finds no room, and the heap grows, for minutes, to several
times what is needed. So ranks are started without that cache.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
LARGE: Final = 64 << 20
"""Bytes from which on memory goes back to the kernel all the same: a data set, not a layer's outputs."""

PAD: Final = 64 << 20
"""Bytes by which the heap grows at the least."""

TUNABLES: Final = "GLIBC_TUNABLES"
"""The environment variable that glibc reads when a process starts."""


def start_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a process is to be started with, so that its heap stays whole.

    Args:
        environ: its environment without them; where the user has said how to allocate, that stays.
    """
    told = environ.get(TUNABLES, "")
    if _is_chosen(environ) or "glibc.malloc." in told:
        return {}
    return {TUNABLES: ":".join(filter(None, (told, "glibc.malloc.tcache_count=0")))}


def keep_memory() -> bool:
    """Have this process keep what it frees, unless the user's environment says how to allocate.

    Returns:
        Whether it does from now on; not where the C library is none of GNU's.
    """
    # Only the largest tensors get pages of their own, the heap never shrinks, and it grows in large pieces.
    return _wish((_MMAP_THRESHOLD, LARGE), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, PAD))


def give_back_memory() -> None:
    """Return to the kernel what this process has freed so far."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _wish(*wishes: tuple[int, int]) -> bool:
    """Tell the C library how to allocate; returns whether it listens."""
    if _is_chosen(os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    results = [mallopt(what, value) for what, value in wishes]
    return all(result == 1 for result in results)


def _is_chosen(environ: Mapping[str, str]) -> bool:
    """Whether the user has said how to allocate."""
    return any(name.startswith("MALLOC_") for name in environ)
