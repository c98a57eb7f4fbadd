"""Fork servers of the product that tests start in their own process, forked from the server of programs.

    test ── Popen ──▶ stub ──▶ server ── forks ──▶ program, which ends ── forks ──▶ fork server

A fork server must be a child of its supervisor: it becomes one when the program has ended, as the test's
process adopts what its descendants leave behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tutti.launch import fork_server_client

PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005


class ForkedServer:
    """What `Popen` is to the client of the fork server.

    Attributes:
        pid: the process.
        returncode: how it ended; None while it runs.
    """

    def __init__(
        self, command: Sequence[str], stdin: int, env: dict[str, str], pass_fds: Sequence[int]
    ) -> None:
        from tests.preloaded import interpreter

        (control,) = pass_fds
        path, settings = json.loads(command[-1])
        with tempfile.NamedTemporaryFile("r", prefix="tutti-tests-") as note, _adopting():
            given = json.dumps([path, settings, note.name])
            program = [*interpreter(descendant=True), __file__, given]
            subprocess.run(program, stdin=control, env=env, check=True)
            self.pid = int(note.read())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it has ended, or None."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it has ended, once it has."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(_POLL_S)
        return found

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of those whose own parent, a descendant of this process, ends meanwhile."""
    set_option = ctypes.CDLL(None).prctl
    set_option(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        set_option(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def forked_fork_servers() -> Iterator[None]:
    """Have those that this process starts meanwhile forked."""
    before = fork_server_client.subprocess  # type: ignore[attr-defined]
    names = SimpleNamespace(
        Popen=ForkedServer, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    fork_server_client.subprocess = names  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fork_server_client.subprocess = before  # type: ignore[attr-defined]


def main() -> None:
    """Be the program, and then the fork server."""
    path, settings, note = json.loads(sys.argv[1])
    control, stub_is_done = os.dup(0), os.getpid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    process = os.fork()
    if process:
        Path(note).write_text(str(process))
        os._exit(0)
    while os.getppid() == stub_is_done:
        time.sleep(_POLL_S)
    from tutti.launch import fork_server

    sys.path[:] = path
    fork_server.main(**{**settings, "control": control})


if __name__ == "__main__":
    main()
