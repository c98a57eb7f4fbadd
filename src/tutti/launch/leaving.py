"""The end of a process that was forked, without taking down all that was imported before the fork.

Python and torch free every function, type and operator that they have. In a forked process each write to such
memory copies a page first: 0.3 s, for nothing. `multiprocessing` leaves it out in its processes, too.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import threading
from contextlib import suppress
from typing import Any, NoReturn, cast


def finish_program() -> None:
    """Do what Python does after a program's end: wait for its threads, call what it gave to `atexit`."""
    # As `multiprocessing` does. The threads of executors must be told to end.
    cast("Any", threading)._shutdown()
    atexit._run_exitfuncs()


def leave() -> NoReturn:
    """End this process, with exit code 0. Files that the program has left open are written to their ends."""
    finish_program()
    # First: the parts of a file that is freed in a circle are closed in any order.
    _flush_files()
    gc.collect()
    _flush_files()
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


def _flush_files() -> None:
    # Those from before the fork are frozen, and not among them.
    for one in gc.get_objects():
        # By its type: asked for its class, a proxy may import what it stands for.
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(OSError, ValueError):  # Nobody could be told any more: Python is silent, too.
                one.flush()
