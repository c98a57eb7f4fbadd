"""The built-in data sets, a file for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tutti import parts
from tutti.data.contents import Contents
from tutti.errors import BadData
from tutti.registry import Registry

BUILT_IN: Registry[Callable[[], Contents[object]]] = parts.DATA_SETS
"""Their readers by name."""


def given_folder(name: str) -> Path | None:
    """Return the folder `TUTTI_DATA/NAME`, if there is one."""
    given = os.environ.get("TUTTI_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise BadData(f"TUTTI_DATA is '{given}', which is no folder; correct it or unset it")
    return folder / name if (folder / name).is_dir() else None
