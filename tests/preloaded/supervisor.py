"""Runs a program that starts ranks, which come with torch imported: supervisor.py SOCKET PROGRAM ARGUMENTS...

Those of mpirun are forked from the server of that socket, as this process is. A fork server of the product
is forked from this process, which is what it is like at its begin: torch is imported, and nothing computed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from tests.preloaded import forked_mpi_ranks
from tests.preloaded.program import run
from tutti.launch import fork_server, fork_server_client, mpirun


class ForkedServer(subprocess.Popen):
    """What `Popen` is to the client of the fork server, without a new interpreter."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], pass_fds: Sequence[int], **streams: Any
    ) -> None:
        path, settings = json.loads(command[-1])
        # This function does not return, so the command is never executed.
        become = partial(_become, path, settings, env, sorted(pass_fds))
        super().__init__(command, pass_fds=pass_fds, preexec_fn=become, **streams)


def _become(path: list[str], settings: dict[str, Any], environment: dict[str, str], kept: list[int]) -> None:
    """Be the fork server, and in every process that it forks a rank."""
    code = 1
    try:
        _forget_program(kept)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        fork_server.main(**settings)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # What Python does after the last line of a program.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_program(kept: list[int]) -> None:
    """Have nothing of the program's own, and no open file but the standard streams and those to be `kept`."""
    first = 3
    for last in (*kept, os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, last)
        first = last + 1
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Such as those that remove temporary folders, which the program still needs.
    cast("Any", weakref.finalize)._registry.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    installed = (sys.prefix, sys.base_prefix, str(Path(fork_server.__file__).parents[2]))
    for name, module in [*sys.modules.items()]:
        if not (getattr(module, "__file__", None) or sys.prefix).startswith(installed):
            del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")


if __name__ == "__main__":
    fork_server_client.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=ForkedServer, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    mpirun.command_line = forked_mpi_ranks(sys.argv[1])
    run(sys.argv[2:])
