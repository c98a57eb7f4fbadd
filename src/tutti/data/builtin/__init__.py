"""The built-in data sets, a file for each."""

from __future__ import annotations

from collections.abc import Callable

from tutti import parts
from tutti.data.contents import Contents
from tutti.registry import Registry

BUILT_IN: Registry[Callable[[], Contents[object]]] = parts.DATA_SETS
"""Their readers by name."""
