"""Settings of the C library's heap, without which training is several times slower.

glibc returns the memory of large tensors to the kernel when they are freed; each step then pays for
clearing and mapping the same pages again. So a rank keeps what it frees. torch asks for memory at multiples
of 64 bytes; glibc puts the piece that it cuts off before that into a cache of the thread, where it is never
joined with its neighbours, and the heap grows to several times what is needed. So ranks start without that
cache.
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
    """Return the environment variables to start a rank with; the user's settings stay."""
    chosen = environ.get(TUNABLES, "")
    settings: dict[str, str] = {}
    if not _is_chosen(environ) and "glibc.malloc." not in chosen:
        settings[TUNABLES] = ":".join(filter(None, (chosen, "glibc.malloc.tcache_count=0")))
    return settings


def keep_memory() -> None:
    """Keep freed memory in this process, unless the user's environment sets the allocation."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Only glibc has it.
    if mallopt is None or _is_chosen(os.environ):
        return
    # Only the largest tensors get their own pages, the heap never shrinks, and it grows in large pieces.
    mallopt(_MMAP_THRESHOLD, LARGE)
    mallopt(_TRIM_THRESHOLD, _NEVER)
    mallopt(_TOP_PAD, PAD)


def give_back_memory() -> None:
    """Return freed memory of this process to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _is_chosen(environ: Mapping[str, str]) -> bool:
    """Return whether the user has set how to allocate."""
    return any(name.startswith("MALLOC_") for name in environ)
