"""Processes that multiprocessing starts anew, "spawn" or its fork server, forked from the server of programs.

They are what a new interpreter would be, but come with torch imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util

import pytest


@contextmanager
def forked_children() -> Iterator[None]:
    """Have those that this process starts meanwhile forked."""
    from tests.preloaded import child

    start = util.spawnv_passfds

    def fork(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
        code = arguments.index("-c") + 1
        # That of shared memory imports nothing.
        if "resource_tracker" in arguments[code]:
            return start(path, arguments, kept)
        return start(os.fsencode(sys.executable), [*child(kept), *arguments[code:]], kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", fork)
        yield
