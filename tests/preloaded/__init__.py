"""Programs that a launcher starts, as processes forked from a server that has torch imported.

    launcher ── starts ──▶ stub ── arguments, environment, streams ──▶ server ── forks ──▶ program

Importing torch costs every rank seconds; a stub starts in milliseconds. To the launcher it is the rank, and
lives as long as the program, passes signals on to it and ends as it ends.
The program of a stub that is gone is killed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def interpreter(*, starts_ranks: bool = False) -> list[str]:
    """What a launcher is to start in place of Python, before a program's path and its arguments.

    Args:
        starts_ranks: whether the program does, and these shall come with torch imported, too.
    """
    server = _server()
    beside = ["supervisor.py", server] if starts_ranks else ["program.py"]
    return [*_stub(server), str(HERE / beside[0]), *beside[1:]]


def command() -> list[str]:
    """What is to be started in place of `tutti`, before the command's own words."""
    return [*interpreter(starts_ranks=True), str(HERE / "command.py")]


def forked_mpi_ranks(server: str | None = None) -> Callable[..., list[str]]:
    """`tutti.launch.mpirun.command_line`, for ranks that a server forks; by default that of this process."""
    from tutti.launch.mpirun import command_line

    rank = [*_stub(server or _server()), str(HERE / "program.py"), str(HERE / "mpi_rank.py")]

    def with_such_ranks(*given: Any, **named: Any) -> list[str]:
        command = command_line(*given, **named)
        return [*command[: command.index(sys.executable)], *rank]

    return with_such_ranks


def _stub(server: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(HERE / "stub.py"), server]


@cache
def _server() -> str:
    """The path of the server's socket; one server serves all tests of this process, and ends with it."""
    folder = tempfile.mkdtemp(prefix="tutti-tests-server-")
    path = os.path.join(folder, "socket")
    # Who starts a fork server holds Ctrl-C back meanwhile: all programs would do so for ever.
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded.server", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert server.stdin is not None
    assert server.stdout is not None

    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return path
