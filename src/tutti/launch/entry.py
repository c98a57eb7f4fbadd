"""The function that every rank runs: named "package.module:function", called as function(comm, payload)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.comm.base import Communicator

    Entry = Callable[[Communicator, bytes], object]


def load_entry(name: str) -> Entry:
    """The function that `name` stands for."""
    module, _, function = name.partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found
