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
import sys
import sysconfig
import threading
import weakref
from itertools import takewhile
from types import ModuleType
from typing import Any, Final, NoReturn, cast

from tutti.errors import no_room
from tutti.terminal import say_last

_INSTALLED: Final = tuple(
    {os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)


_last_module: str | None = None
"""The module that was imported last before the fork."""


def prepare_fork() -> None:
    """Have the processes that will be forked leave to this one, at their ends, what was there before them.

    They free nothing of it, and do not do what it gave to `weakref.finalize`, such as removing its temporary
    folders.
    """
    global _last_module
    _last_module = next(reversed(sys.modules))
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
    unwritten = _flush_files()
    _let_go_of_values()
    gc.collect()
    unwritten |= _flush_files()
    ctypes.CDLL(None).fflush(None)
    if unwritten:
        say_last("".join(f"tutti: error: {error}\n" for error in sorted(unwritten)))
    os._exit(1 if unwritten else 0)


def _let_go_of_values() -> None:
    """Free what the user's modules hold, as Python does: a compressed file is written to its end then.

    The last comes first, and functions and classes stay: the ends of the values may need them.
    """
    # A thread that still runs may miss a value for the moment that is left.
    threading.excepthook = lambda _: None
    for name in [*_new_modules(), "__main__"]:
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None) if type(module) is ModuleType else None
        if not isinstance(path, str) or path.startswith(_INSTALLED) or name.partition(".")[0] == "tutti":
            continue
        values = vars(module)
        for one in [one for one in reversed(values) if not one.startswith("__")]:
            if not callable(values[one]) and not issubclass(type(values[one]), ModuleType):
                del values[one]


def _new_modules() -> list[str]:
    """What was imported after the fork, the last first."""
    # Looking at the others copies their memory.
    return list(takewhile(lambda name: name != _last_module, reversed(sys.modules)))


def _flush_files() -> set[str]:
    """Write open files to their ends, and say of which there is no room for it."""
    unwritten = set()
    # Those from before the fork are frozen, and not among them.
    for one in gc.get_objects():
        # By its type: asked for its class, a proxy may import what it stands for.
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            try:
                one.flush()
            except OSError as error:
                # Of others, such as a pipe that nobody reads, Python is silent, too.
                if known := no_room(error, getattr(one, "name", None)):
                    unwritten.add(str(known))
            except ValueError:
                pass  # it is closed
    return unwritten
