"""The start of the process that evaluates beside training: out of the way first, torch afterwards."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Final

PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from tutti.training.background_process import settle_in; start = settle_in(); "
    "from tutti.training.background import serve; serve(start)"
)
"""The program of the process: with the rank's search path it finds the same modules."""

_PR_SET_PDEATHSIG: Final = 1
_NICEST: Final = 19


@dataclass(frozen=True)
class Start:
    """The argument of the process, as JSON.

    Attributes:
        parent: the rank that starts it.
        path: `sys.path` of the rank.
        files: Python files that the rank has imported by their paths.
        connection: the descriptor of the connection to the rank.
        work: that of the file with the pickled `tutti.training.background.Work`.
        memory: that of the memory for snapshots.
    """

    parent: int
    path: list[str]
    files: list[str]
    connection: int
    work: int
    memory: int


def settle_in() -> Start:
    """Be quiet, be last, and be gone when the parent is; return the argument of the process."""
    start = Start(**json.loads(sys.argv[1]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != start.parent:
        os._exit(1)
    # They may reach every process of a job, which stops when its ranks have saved.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(_NICEST)
    return start
