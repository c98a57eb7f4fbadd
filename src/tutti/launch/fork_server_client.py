"""The supervisor's side of the fork server, which is kept, so that a second job need not wait for torch."""

from __future__ import annotations

import atexit
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from typing_extensions import override

from tutti.launch.cores import BINDING
from tutti.launch.fork_server import GRACE_S, IDLE_S, EndRanks, NewGroup, RankEnded, Ready, receive, send
from tutti.launch.rank_main import Descriptors, RankPlace
from tutti.launch.runtime_settings import start_settings
from tutti.launch.signals import held_back

_POLL_S: Final = 0.01
_PROGRAM: Final = (
    "import json, sys; sys.path[:], settings = json.loads(sys.argv[1]); "
    "from tutti.launch.fork_server import main; main(**settings)"
)


class RankGroup:
    """The socket for requests to a fork server for ranks that begin and end together."""

    ready = True  # the server has imported torch

    def __init__(self, control: socket.socket, server: ForkServer | None = None) -> None:
        self.control, self._server = control, server

    def fork(self, start: RankPlace, descriptors: Descriptors) -> None:
        """Fork a rank. If the server is gone, `next_message` reports it."""
        self._send(start, [one for one in descriptors if one is not None])

    def next_message(self) -> RankEnded | Ready | None:
        """Return the server's next message; None if it is gone."""
        message, _ = receive(self.control)
        assert message is None or isinstance(message, RankEnded | Ready), "what a fork server says"
        return message

    def returncode(self) -> int:
        """Return the exit code of the server, which is gone."""
        assert self._server is not None
        return self._server.returncode()

    def close(self) -> None:
        """Kill the ranks, and the processes that they have started."""
        self.control.close()

    def _send(self, message: RankPlace | NewGroup, descriptors: Sequence[int]) -> None:
        while True:
            try:
                return send(self.control, message, descriptors)
            except (BrokenPipeError, ConnectionResetError):
                return None
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                # The limit on descriptors in flight is reached; the server is about to take them.
                time.sleep(_POLL_S)


class ForkServer(RankGroup):
    """A fork server, which imports the module of the `entry` that its ranks will run."""

    def __init__(self, entry: str = "") -> None:
        self.ready = False
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(control)
        # It lets SIGINT through once it ignores it: a Ctrl-C while it starts must not fill the screen.
        with ExitStack() as unless_started, theirs, held_back(signal.SIGINT):
            unless_started.callback(self.control.close)
            settings = {
                "supervisor": os.getpid(),
                "control": theirs.fileno(),
                "idle_s": IDLE_S,
                "entry": entry,
            }
            given = json.dumps([[str(folder) for folder in sys.path], settings])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, given],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
            )
            unless_started.pop_all()

    def group(self) -> RankGroup:
        """Return a group of ranks."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._send(NewGroup(), [theirs.fileno()])
        return RankGroup(control, self)

    def runs(self) -> bool:
        """Return whether this server still runs."""
        hung_up = select.poll()
        hung_up.register(self.control, 0)
        return self._process.poll() is None and not hung_up.poll(0)

    def clear(self, grace_s: float) -> bool:
        """Kill all ranks and end their processes; return whether the server can take others."""
        if not self.ready:
            # No rank is there yet.
            return False
        try:
            send(self.control, EndRanks(grace_s))
        except OSError:
            return False
        while (message := self.next_message()) is not None:
            if isinstance(message, Ready):
                return True
        return False

    @override
    def next_message(self) -> RankEnded | Ready | None:
        message = super().next_message()
        self.ready = self.ready or isinstance(message, Ready)
        return message

    @override
    def returncode(self) -> int:
        return self._process.wait()

    @override
    def close(self) -> None:
        """End the server, the ranks, and their processes."""
        self.control.close()
        if not self.ready:
            # It may take seconds until it listens.
            self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in BINDING}
    # Each rank sets its own number.
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = "1"
    return environment | start_settings(environment)


_kept: Final[list[ForkServer]] = []
"""Servers between two jobs; `pop` gives simultaneous threads different ones."""


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Yield a fork server for one job: the kept one, or a new one; it is kept afterwards."""
    server = _taken_or_new()
    usable = False
    try:
        yield server
    finally:
        try:
            usable = server.clear(GRACE_S)
        finally:
            # Of simultaneous jobs one keeps its server; if two come here at the same time, both do.
            if usable and not _kept:
                _kept.append(server)
            else:
                server.close()


def prepare_ranks(entry: str) -> None:
    """Start the process that forks ranks, unless it is kept; it imports the modules that they need."""
    _kept.append(_taken_or_new(entry))


def _taken_or_new(entry: str = "") -> ForkServer:
    server = _take()
    if server is not None and not server.runs():
        server.close()
        server = None
    return server or ForkServer(entry)


def _take() -> ForkServer | None:
    try:
        return _kept.pop()
    except IndexError:
        return None


def end_ranks() -> None:
    """End the process kept for later ranks, if there is one: it has some 300 MB of memory."""
    while server := _take():
        server.close()


def _disown_after_fork() -> None:
    """Leave the server to the parent, in a forked process of the program."""
    while server := _take():
        server.control.close()
        _parents.append(server)


_parents: list[ForkServer] = []
"""The parents' servers: referenced, so that no `Popen.__del__` waits for them."""

atexit.register(end_ranks)
os.register_at_fork(after_in_child=_disown_after_fork)
