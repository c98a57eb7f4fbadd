"""Processes that end when their parent ends, even when the parent is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, is gone.

    The kernel counts the *thread* that started this process as its parent, so that thread must stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have gone before the call above: then nothing would ever arrive.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
