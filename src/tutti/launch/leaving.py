"""The end of a process that was forked, without taking down all that was imported before the fork.

Python and torch free every function, type and operator that they have. In a forked process each write to such
memory copies a page first: 0.3 s, for nothing. `multiprocessing` leaves it out in its processes, too.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import threading
import weakref
from typing import Any, NoReturn, cast

from tutti.errors import no_room
from tutti.terminal import say_last


def prepare_fork() -> None:
    """Leave what was given to `weakref.finalize` so far to this process, not to those that it forks."""
    for one in cast("Any", weakref.finalize)._registry:
        one.atexit = False


def finish_program() -> None:
    """Do what Python does after a program's end: wait for its threads, call what it gave to `atexit`."""
    # As `multiprocessing` does. The threads of executors must be told to end.
    cast("Any", threading)._shutdown()
    atexit._run_exitfuncs()


def leave() -> NoReturn:
    """End this process. Files that the program has left open are written to their ends.

    Its exit code is 0, or 1 if there is no room for one of them.
    """
    finish_program()
    # First: the parts of a file that is freed in a circle are closed in any order.
    problems = _flush_files()
    gc.collect()
    problems |= _flush_files()
    if problems:
        say_last("".join(f"tutti: error: {problem}\n" for problem in sorted(problems)))
    os._exit(1 if problems else 0)


def _flush_files() -> set[str]:
    """Write open files to their ends; return for which of them there is no room."""
    problems = set[str]()
    # Those from before the fork are frozen, and not among them.
    for one in gc.get_objects():
        # By its type: asked for its class, a proxy may import what it stands for.
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            try:
                one.flush()
            except OSError as error:
                # Of others, such as a pipe that nobody reads, Python is silent, too.
                if known := no_room(error, getattr(one, "name", None)):
                    problems.add(str(known))
            except ValueError:
                pass  # it is closed
    return problems
