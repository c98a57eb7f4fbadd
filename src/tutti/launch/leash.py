"""Processes that end when their parent ends, even when that is killed with SIGKILL; and orphans."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, is gone.

    The kernel counts the *thread* that started this process as its parent, so that thread must stay.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have gone before the call above: then nothing would ever arrive.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take back `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
