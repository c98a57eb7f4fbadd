"""The end of a forked process, without freeing what was imported before the fork.

Python and torch free every function, type and operator that they have. In a forked process each write to such
memory copies a page first: 0.3 s, for nothing. `multiprocessing` skips it in its processes, too.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import threading
import weakref
from typing import Any, NoReturn, cast

from tutti.terminal import say_last


def prepare_fork() -> None:
    """Leave existing `weakref.finalize` callbacks to this process, not to its forks."""
    for one in cast("Any", weakref.finalize)._registry:
        one.atexit = False


def finish_program() -> None:
    """Do what Python does at a program's end: wait for its threads, and run its `atexit` functions."""
    # As `multiprocessing` does, so that the threads of executors end.
    cast("Any", threading)._shutdown()
    atexit._run_exitfuncs()


def leave() -> NoReturn:
    """Flush files that the program has left open, and exit with 0, or with 1 if that fails."""
    finish_program()
    # First: the parts of a file that is freed in a circle are closed in any order.
    errors = _flush_files()
    gc.collect()
    errors |= _flush_files()
    if errors:
        say_last("".join(f"tutti: error: {error}\n" for error in errors))
    os._exit(1 if errors else 0)


def _flush_files() -> set[str]:
    errors = set[str]()
    # Those from before the fork are frozen, and not among them.
    for one in gc.get_objects():
        # By its type: asked for its class, a proxy may import what it stands for.
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            try:
                one.flush()
            except (BrokenPipeError, ValueError):
                pass  # Nothing reads it, or it is closed.
            except OSError as error:
                errors.add(f"cannot write {getattr(one, 'name', 'a file')}: {error.strerror}")
    return errors
