"""Order between data and the flag that announces it, as other processors see them."""

from __future__ import annotations

import platform
import threading
from typing import Final

ORDERED: Final = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether the processor itself keeps stores in order and loads in order: `fence` has nothing to do."""

_mutex = threading.Lock()


def fence() -> None:
    """Let no load or store cross this point, in either direction.

    Two acquire-release pairs are a full fence on processors whose acquire does not overtake an earlier
    release (Arm's rule for its load-acquire and store-release): nothing before it moves past the first
    release, nothing after it moves before the second acquire.
    """
    if not ORDERED:
        with _mutex:
            pass
        with _mutex:
            pass
