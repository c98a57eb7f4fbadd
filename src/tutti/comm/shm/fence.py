"""Order between data and the flag that announces it, as other processors see them."""

from __future__ import annotations

import platform
import threading
from typing import Final

ORDERED: Final = platform.machine() in ("x86_64", "AMD64", "i686")
"""True where the processor keeps stores in order, loads in order, and a load before later stores (x86's TSO).

There `fence` has nothing to do: the one order that x86 does not keep, of a store and a later load of another
word, nothing here rests on. Compilers cannot reorder either: each access is a call of the interpreter's.
"""

_mutex = threading.Lock()


def fence() -> None:
    """Let no load or store cross this point, in either direction.

    Python has no fence, but its locks acquire and release. Two such pairs make a fence on processors whose
    acquire does not overtake an earlier release (Arm's rule for its load-acquire and store-release):

        before [1] acquire  [2] release  [3] acquire  [4] release  after

    What is before does not move past [2], [3] does not move before [2], what is after does not move before
    [3].
    """
    if not ORDERED:
        with _mutex:  # [1], [2]
            pass
        with _mutex:  # [3], [4]
            pass
