"""Which processes the kernel ends first, should the memory run out. Needs the standard library alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_SCORE: Final = Path("/proc/self/oom_score_adj")
_before = "0"


def be_ended_first(first: bool) -> None:
    """Have the kernel end this process before others, such as those that train, or as before."""
    global _before
    with suppress(OSError):
        if first:
            _before = _SCORE.read_text()
        _SCORE.write_text("1000" if first else _before)
