"""The built-in data sets, a file for each."""

from __future__ import annotations

from collections.abc import Callable

from tutti.data.contents import Contents
from tutti.data.formats import FORMATS
from tutti.registry import Registry

BUILT_IN: Registry[Callable[[], Contents[object]]] = Registry(
    "tutti.data.builtin",
    "data set",
    lambda: (
        f"Or give a path ({', '.join(FORMATS)}, a folder), 'package.module:factory' or 'file.py:factory'."
    ),
)
"""Their readers by name."""
