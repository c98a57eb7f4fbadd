"""A process that has torch imported and forks the ranks: the import takes seconds, a fork milliseconds.

    supervisor ── socket ──────────────▶ fork server ──fork──▶ rank 0, rank 1
               ── socket of a group ───▶      ▲      ──fork──▶ rank 0, rank 1 of the group
               ──fork──▶ guard ──────fork─────┘

    on each socket: ──RankPlace, EndRanks──▶   ◀──Ready, RankEnded──

It computes nothing itself, so that every rank begins like a process that has just been started. It ends with
the supervisor, or when that closes the first socket, or after `IDLE_S` without ranks; processes that ranks
have left running end before it. If it is killed, its parent, the guard, kills them. A group begins and ends
without other ranks: its ranks are killed when its socket is closed.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Final, NoReturn

from tutti.errors import with_remedy
from tutti.launch.leaving import leave, prepare_fork
from tutti.launch.orphans import adopt_orphans, die_with_parent, outlive_parent
from tutti.launch.rank_main import Descriptors, RankPlace, run
from tutti.launch.signals import SignalWatch
from tutti.terminal import say_last

IDLE_S: Final = 300.0
"""Time without ranks after which a fork server ends."""

GRACE_S: Final = 1.0
"""Time for children of ranks to exit on SIGTERM, before SIGKILL."""

_MESSAGE_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 8
_POLL_S: Final = 0.05
_OWN: Final = "tutti."


@dataclass(frozen=True)
class EndRanks:
    """Kill all ranks, and end their children: SIGTERM, and after `grace_s` seconds SIGKILL."""

    grace_s: float


@dataclass(frozen=True)
class NewGroup:
    """Start a group of ranks. A socket comes with this message, for the group's commands."""


@dataclass(frozen=True)
class RankEnded:
    """A rank has ended, with this exit code or by minus this signal."""

    rank: int
    returncode: int


@dataclass(frozen=True)
class Ready:
    """There is no rank, nor a process started by one: sent before the first, and after `EndRanks`."""


Message = RankPlace | EndRanks | NewGroup | RankEnded | Ready


def send(control: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with its descriptors; OSError if the other side is gone."""
    socket.send_fds(control, [pickle.dumps(message)], descriptors)


def receive(control: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and its descriptors; None if the other side is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(
            control, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None, []
    message: Message | None = pickle.loads(data) if data else None
    return message, descriptors


def main(supervisor: int, control: int, idle_s: float, entry: str) -> None:
    """Be the fork server, and in every process that it forks a rank."""
    # Ctrl-C reaches the whole foreground group, and systemd and Slurm signal all processes of a job: the
    # supervisor decides what signals mean.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The supervisor has started this process with SIGINT blocked; it is ignored before it is let through.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    guard = os.getpid()
    server = os.fork()
    if server:
        os.close(control)
        _guard(supervisor, server)
    # While it imports torch, it does not watch the guard's pidfd: the kernel does that for it.
    die_with_parent(guard)
    # Imported modules stay: collecting garbage meanwhile takes a sixth of the time until ranks start.
    gc.disable()
    import psutil  # noqa: F401
    import torch  # noqa: F401

    # What each rank needs to join the others.
    import tutti.comm.shm.communicator
    import tutti.launch.busy_cores
    import tutti.launch.world  # noqa: F401

    _load(entry)
    # From here on the guard's pidfd shows its end, which leaves time to end the ranks.
    outlive_parent()
    # Children of a dead rank become children of this process, not of init, so that `_clear` can end them.
    adopt_orphans()
    forked = ForkServerProcess(guard, socket.socket(fileno=control), idle_s).serve()
    if forked is None:
        # There is nothing to clean up, and taking torch down takes time.
        os._exit(0)
    gc.enable()
    rank = os.getpid()
    run(*forked)
    if os.getpid() == rank:
        leave()


def _guard(supervisor: int, server: int) -> NoReturn:
    """Kill the processes of a killed server, and end as it has; end at once with the supervisor."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    adopt_orphans()
    ends = select.poll()
    with suppress(ProcessLookupError):
        for process in (supervisor, server):
            ends.register(os.pidfd_open(process), select.POLLIN)
        # If the supervisor ended before, its number may be another's: look who the parent is.
        if os.getppid() == supervisor:
            ends.poll()
    ended, status = os.waitpid(server, os.WNOHANG)
    if not ended:
        os._exit(0)
    import psutil

    with suppress(ChildProcessError):
        while True:  # What a child has started becomes a child of this process with its end.
            signal_all((child.pid for child in psutil.Process().children()), signal.SIGKILL)
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class ForkServerProcess:
    """The fork server's own side; it ends after `idle_s` seconds without ranks."""

    def __init__(self, parent: int, control: socket.socket, idle_s: float) -> None:
        self._parent, self._control, self._idle_s = parent, control, idle_s
        self._groups = [control]
        # By process: the socket of its group, and its number there.
        self._ranks: dict[int, tuple[socket.socket, int]] = {}
        self._childless = True

    def serve(self) -> tuple[RankPlace, Descriptors] | None:
        """Fork ranks until the end; return in each rank, and None here."""
        with ExitStack() as stack:
            stack.callback(self._close)
            parent = os.pidfd_open(self._parent)
            stack.callback(os.close, parent)
            # If it ended before the pidfd was opened, its number may be another's: look who the parent is.
            if os.getppid() != self._parent:
                return None
            self._ended = stack.enter_context(SignalWatch([signal.SIGCHLD]))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            for one in (self._control, parent, self._ended):
                self._selector.register(one, selectors.EVENT_READ)
            try:
                send(self._control, Ready())
                return self._serve(parent)
            except (BrokenPipeError, ConnectionResetError):
                # The supervisor or the guard is gone.
                self._clear(GRACE_S)
                return None

    def _close(self) -> None:
        for one in self._groups:
            one.close()

    def _serve(self, parent: int) -> tuple[RankPlace, Descriptors] | None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(None if self._ranks else self._idle_s)]
            if parent in ready:
                raise BrokenPipeError
            if not (ready or self._ranks):
                return None
            if self._ended in ready:
                # First: a child that ends between the two calls wakes the selector again.
                self._ended.acknowledge()
                self._reap()
            for group in [one for one in self._groups if one in ready]:
                forked = self._obey(group)
                if forked is not None:
                    return forked

    def _obey(self, group: socket.socket) -> tuple[RankPlace, Descriptors] | None:
        """Obey the next message of a socket; return only in a new rank."""
        message, descriptors = receive(group)
        if isinstance(message, RankPlace):
            if self._fork(message, group):
                return message, Descriptors(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif isinstance(message, NewGroup):
            self._groups.append(socket.socket(fileno=descriptors[0]))
            self._selector.register(self._groups[-1], selectors.EVENT_READ)
        elif isinstance(message, EndRanks):
            self._clear(message.grace_s)
            send(group, Ready())
        elif group is self._control:
            raise BrokenPipeError
        else:
            self._end_group(group)
        return None

    def _fork(self, start: RankPlace, group: socket.socket) -> bool:
        """Fork a rank; return True in it, False in this process."""
        _load(start.entry)
        own = os.getpid()
        # A rank that looks for garbage in what is here, as each does at its end, copies it all.
        gc.freeze()
        prepare_fork()
        with warnings.catch_warnings():
            # From 3.12 on Python warns of threads; libraries that have some here prepare them for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process = os.fork()
            except OSError as error:
                say_last(f"tutti: error: {with_remedy(error) or error}\n")
                os._exit(1)
        if process == 0:
            # The server forks in its main thread: so this signal comes when the process ends, not before.
            die_with_parent(own)
            return True
        self._ranks[process] = group, start.rank
        return False

    def _reap(self) -> None:
        """Report the ranks that have ended; forget other processes."""
        self._childless = False
        # Several children that end at the same time may send a single SIGCHLD.
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            if process == 0:
                return
            if process in self._ranks:
                group, rank = self._ranks.pop(process)
                with suppress(BrokenPipeError, ConnectionResetError):  # The group's owner is gone.
                    send(group, RankEnded(rank, os.waitstatus_to_exitcode(status)))

    def _end_group(self, group: socket.socket) -> None:
        """Kill the ranks of a group whose socket is closed, and their children."""
        import psutil  # Not in the supervisor, which imports this module too.

        ranks = [process for process, (one, _) in self._ranks.items() if one is group]
        started = list[int]()
        for process in ranks:
            with suppress(psutil.Error):
                started += [child.pid for child in psutil.Process(process).children(recursive=True)]
            del self._ranks[process]
        signal_all([*ranks, *started], signal.SIGKILL)
        self._selector.unregister(group)
        self._groups.remove(group)
        group.close()

    def _clear(self, grace_s: float) -> None:
        """Kill all ranks, and end the other children: those of a child that has ended become ours."""
        import psutil

        deadline = time.monotonic() + grace_s
        asked: set[int] = set()
        self._reap()
        while not self._childless:
            signal_all(self._ranks, signal.SIGKILL)
            children = {child.pid for child in psutil.Process().children()} - self._ranks.keys()
            if time.monotonic() >= deadline:
                signal_all(children, signal.SIGKILL)
            else:
                signal_all(children - asked, signal.SIGTERM)
            asked |= children
            # The children of an ended child have become ours by then. Looking for them takes milliseconds.
            select.select([self._ended], [], [], _POLL_S)
            self._ended.acknowledge()
            self._reap()


def signal_all(processes: Iterable[int], signum: int) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signum)


def _load(entry: str) -> None:
    """Import the module of an entry, unless it is the user's, which may do anything."""
    module = entry.partition(":")[0]
    if module.startswith(_OWN):
        with suppress(ImportError, OSError):  # The rank says why.
            import_module(module)
