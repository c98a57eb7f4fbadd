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
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def interpreter(*, for_supervisor: bool = False) -> list[str]:
    """What a launcher is to start in place of Python, before a program's path and its arguments.

    Args:
        for_supervisor: whether the program starts ranks, which shall have torch imported, too.
    """
    place = Path(__file__)
    stub = [sys.executable, "-I", "-S", str(place.with_name("stub.py")), _server()]
    return [*stub, str(place.with_name("fork_servers.py"))] if for_supervisor else stub


def command() -> list[str]:
    """What is to be started in place of `tutti`, before the command's own words."""
    return [*interpreter(for_supervisor=True), str(Path(__file__).with_name("command.py"))]


@cache
def _server() -> str:
    """The path of the server's socket; one server serves all tests of this process, and ends with it."""
    folder = tempfile.mkdtemp(prefix="tutti-tests-server-")
    path = os.path.join(folder, "socket")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.preloaded.server", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return path
