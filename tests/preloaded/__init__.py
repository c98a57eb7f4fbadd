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
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SERVER = "TUTTI_TESTS_SERVER"
"""The environment variable with the socket of a server that runs already."""


def interpreter(*, starts_ranks: bool = False, descendant: bool = False) -> list[str]:
    """What a launcher is to start in place of Python, before a program's path and its arguments.

    Args:
        starts_ranks: whether the program does, and these shall come with torch imported, too.
        descendant: whether the program is to descend from this process, which then has a server of its own.
    """
    beside = ["supervisor.py", server_socket()] if starts_ranks else ["program.py"]
    return [*_stub(_own_server() if descendant else None), str(HERE / beside[0]), *beside[1:]]


def command() -> list[str]:
    """What is to be started in place of `tutti`, before the command's own words."""
    return [*interpreter(starts_ranks=True), str(HERE / "command.py")]


def forked_mpi_ranks(path: str | None = None) -> Callable[..., list[str]]:
    """`tutti.launch.mpirun.command_line`, for ranks that a server forks; by default that of this process."""
    from tutti.launch.mpirun import command_line

    rank = [*_stub(path), str(HERE / "program.py"), str(HERE / "mpi_rank.py")]

    def with_such_ranks(*given: Any, **named: Any) -> list[str]:
        command = command_line(*given, **named)
        return [*command[: command.index(sys.executable)], *rank]

    return with_such_ranks


def child(kept: Sequence[int]) -> list[str]:
    """What is to be started in place of `python -c`, before the code and its arguments.

    Args:
        kept: the descriptors that the process inherits besides the standard streams.
    """
    keep = ",".join(map(str, kept))
    return [*_stub(), f"--keep={keep}", str(HERE / "program.py"), str(HERE / "child.py")]


def _stub(path: str | None = None) -> list[str]:
    return [sys.executable, "-I", "-S", str(HERE / "stub.py"), path or server_socket()]


@cache
def server_socket() -> str:
    """The path of the socket of the server that serves the tests of this process."""
    path = os.environ.get(SERVER)
    if path is None:
        path, ready = start_server()
        ready()
    return path


@cache
def _own_server() -> str:
    """The path of the socket of a server that this process has started."""
    if SERVER not in os.environ:
        return server_socket()
    path, ready = start_server()
    ready()
    return path


def start_server(*modules: str) -> tuple[str, Callable[[], None]]:
    """Start a server that ends with this process; the path of its socket, and what waits until it serves.

    Args:
        modules: what it imports besides what all ranks do.
    """
    folder = tempfile.mkdtemp(prefix="tutti-tests-server-")
    path = os.path.join(folder, "socket")
    # Who starts a fork server holds Ctrl-C back meanwhile: all programs would do so for ever.
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded.server", path, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert server.stdin is not None
    said = server.stdout
    assert said is not None

    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)

    @cache
    def ready() -> None:
        assert said.readline() == b"ready\n"

    atexit.register(end)
    return path, ready
