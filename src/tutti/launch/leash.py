"""Processes that end when their parent ends, even when the parent is killed with SIGKILL.

Run as a program, `python -m tutti.launch.leash PARENT COMMAND...` becomes COMMAND, which gets SIGTERM when
the process PARENT is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent, the process `parent`, is gone.

    The kernel counts the *thread* that started this process as its parent, so that thread must stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have gone before the call above: then nothing would ever arrive.
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def main() -> None:
    """Become the command on the command line, on a leash."""
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
