"""A process that has torch imported and forks the ranks: the import takes seconds, a fork milliseconds.

    supervisor ──Load, RankPlace, EndRanks──▶ fork server ──fork──▶ rank 0, rank 1, ...
               ◀──RankEnded, NotForked, Ready──

It computes nothing itself, so that every rank begins like a process that has just been started, whatever the
ranks before it did. It ends with the supervisor, or when that closes the socket, or after `IDLE_S` without
ranks; processes that ranks have left running end before it.

For groups of ranks that begin and end without each other it forks servers like itself, with a socket each:

    supervisor ──Branch──▶ fork server ──fork──▶ branch ──fork──▶ rank 0, rank 1 of group 0
               ◀──RankEnded, NotForked, Ready──────┘

Where no more processes may be started, or files be opened, it says so, and what it has forked goes on.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import select
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final

from tutti.errors import no_process
from tutti.launch.guard import signal_all
from tutti.launch.leaving import leave, prepare_fork
from tutti.launch.orphans import adopt_orphans, die_with_parent, outlive_parent
from tutti.launch.rank_main import Descriptors, RankPlace, run
from tutti.launch.signals import SignalWatch

IDLE_S: Final = 300.0
"""After how long without ranks a fork server ends."""

GRACE_S: Final = 1.0
"""Time of ranks, and of what they have started, to exit on SIGTERM, before SIGKILL."""

_MESSAGE_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 8
_POLL_S: Final = 0.05
_OWN: Final = "tutti."


@dataclass(frozen=True)
class EndRanks:
    """End all ranks, and all that they have started: SIGTERM, and after `grace_s` seconds SIGKILL."""

    grace_s: float


@dataclass(frozen=True)
class Load:
    """Import what the ranks to come will need.

    Attributes:
        entry: the function that they will run.
    """

    entry: str


@dataclass(frozen=True)
class Branch:
    """Fork a server like this one, on the socket that is sent with it.

    Attributes:
        entry: the function that its ranks will run.
    """

    entry: str


@dataclass(frozen=True)
class RankEnded:
    """A rank has ended, with this exit code or by minus this signal."""

    rank: int
    returncode: int


@dataclass(frozen=True)
class NotForked:
    """A rank, or a server, could not be forked.

    Attributes:
        why: the reason, and what to do.
    """

    why: str


@dataclass(frozen=True)
class Ready:
    """There is no rank, nor anything that one has started: sent before the first, and after `EndRanks`."""


Message = RankPlace | EndRanks | Load | Branch | RankEnded | NotForked | Ready


def send(control: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with the descriptors that belong to it.

    Raises:
        OSError: the other side is gone.
    """
    socket.send_fds(control, [pickle.dumps(message)], descriptors)


def receive(control: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and the descriptors that came with it; None when the other side is gone.

    Raises:
        OSError: this process may not have so many descriptors.
    """
    try:
        data, descriptors, flags, _ = socket.recv_fds(
            control, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None, []
    if flags & socket.MSG_CTRUNC:
        for one in descriptors:
            os.close(one)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not data:
        return None, []
    message: Message = pickle.loads(data)
    return message, descriptors


def main(supervisor: int, control: int, idle_s: float) -> None:
    """Be the fork server, and in every process that it forks a rank.

    Args:
        supervisor: the process that has started this one.
        control: the descriptor of the socket between them.
        idle_s: after how long without ranks to end.
    """
    # While it imports torch, it does not watch the supervisor's pidfd: the kernel does that for it.
    die_with_parent(supervisor)
    # Ctrl-C reaches the whole foreground group, and systemd and Slurm send the others to all processes of a
    # job; what they mean is for the supervisor to decide.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The supervisor has started this process with SIGINT blocked; it is ignored before it is let through.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Imported modules stay: collecting garbage meanwhile takes a sixth of the time until ranks start.
    gc.disable()
    import psutil  # noqa: F401
    import torch  # noqa: F401

    # From here on the supervisor's pidfd tells that it is gone, which leaves time to end the ranks.
    # Besides, the kernel's signal would come when only the *thread* ends that has started this process.
    outlive_parent()
    found: Forked | None = Forked(Branch(""), [control])
    parent = supervisor
    while found is not None and isinstance(found.message, Branch):
        # A rank may die before the processes that it has started: they then become children of this one, not
        # of init, and `_clear` finds and ends them.
        adopt_orphans()
        server = os.getpid()
        found = ForkServerProcess(supervisor, parent, found.descriptors[0], idle_s).serve()
        parent = server
    if found is not None and isinstance(found.message, RankPlace):
        gc.enable()
        rank = os.getpid()
        run(found.message, Descriptors(*found.descriptors))
        if os.getpid() == rank:
            leave()
    else:
        # There is nothing to clean up, and taking torch down takes time.
        os._exit(0)


@dataclass(frozen=True)
class Forked:
    """The duty of a process that has just been forked: to be a rank, or a server like its parent."""

    message: RankPlace | Branch
    descriptors: list[int]


@dataclass
class ForkServerProcess:
    """The fork server's own side.

    Attributes:
        supervisor: the process that sends messages.
        parent: the process that has started this one: the supervisor, or another server.
        control: the descriptor of the socket.
        idle_s: after how long without ranks to end.
    """

    supervisor: int
    parent: int
    control: int
    idle_s: float
    _ranks: dict[int, int] = field(default_factory=dict)
    _branches: set[int] = field(default_factory=set)
    _childless: bool = True

    def serve(self) -> Forked | None:
        """Fork what is asked for until no more is wanted; returns in each fork, and at the end here."""
        with ExitStack() as stack:
            control = stack.enter_context(socket.socket(fileno=self.control))
            control.set_inheritable(False)
            supervisor = os.pidfd_open(self.supervisor)
            stack.callback(os.close, supervisor)
            # If it ended before the pidfd was opened, its number may be another's: look who the parent is.
            if os.getppid() != self.parent:
                return None
            children = stack.enter_context(SignalWatch([signal.SIGCHLD]))
            selector = stack.enter_context(selectors.DefaultSelector())
            for one in (control, supervisor, children):
                selector.register(one, selectors.EVENT_READ)
            _load_for_first(control)
            try:
                send(control, Ready())
                return self._serve(control, children, selector)
            except (BrokenPipeError, ConnectionResetError):
                # The supervisor is gone.
                signal_all(self._ranks, signal.SIGKILL)
                self._clear(children, GRACE_S)
                return None

    def _serve(
        self, control: socket.socket, children: SignalWatch, selector: selectors.BaseSelector
    ) -> Forked | None:
        while True:
            busy = bool(self._ranks or self._branches)
            ready = [key.fileobj for key, _ in selector.select(None if busy else self.idle_s)]
            if children in ready:
                # First: a child that ends between the two calls wakes the selector again.
                children.acknowledge()
                for ended in self._reap():
                    send(control, ended)
            try:
                message, descriptors = receive(control) if control in ready else (None, [])
            except OSError as error:  # Without its descriptors nothing can be done.
                send(control, NotForked(str(no_process(error))))
                continue
            if isinstance(message, RankPlace | Branch):
                if self._fork(message, control):
                    return Forked(message, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            elif isinstance(message, EndRanks):
                self._clear(children, message.grace_s)
                send(control, Ready())
            elif isinstance(message, Load):
                _load(message.entry)
            elif any(one is not children for one in ready):
                raise BrokenPipeError
            elif not ready and not busy:
                return None

    def _fork(self, start: RankPlace | Branch, control: socket.socket) -> bool:
        """Fork a rank or a server; returns True in it, False in this process, which says if it could not."""
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
                send(control, NotForked(str(no_process(error))))
                return False
        if process == 0:
            # The server forks in its main thread: so this signal comes when the process ends, not before.
            die_with_parent(own)
            return True
        if isinstance(start, RankPlace):
            self._ranks[process] = start.rank
        else:
            self._branches.add(process)
        return False

    def _reap(self) -> list[RankEnded]:
        """The ranks that have ended; whatever else has ended is forgotten."""
        ended: list[RankEnded] = []
        self._childless = False
        # Several children that end at the same time may send a single SIGCHLD.
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return ended
            if process == 0:
                return ended
            self._branches.discard(process)
            rank = self._ranks.pop(process, None)
            if rank is not None:
                ended.append(RankEnded(rank, os.waitstatus_to_exitcode(status)))

    def _clear(self, ended: SignalWatch, grace_s: float) -> None:
        """End all children; those of a child that has ended become ours.

        Args:
            ended: tells that one has.
            grace_s: time to exit on SIGTERM, before SIGKILL.
        """
        import psutil  # Not in the supervisor, which imports this module too.

        deadline = time.monotonic() + grace_s
        asked: set[int] = set()
        self._reap()
        while not self._childless:
            late = time.monotonic() >= deadline
            children = {child.pid for child in psutil.Process().children()}
            if late:
                signal_all(children, signal.SIGKILL)
            else:
                signal_all(children - asked, signal.SIGTERM)
            asked |= children
            # Those of a child that has ended have become ours by then. Looking for them takes milliseconds of
            # those that take over.
            select.select([ended], [], [], _POLL_S)
            ended.acknowledge()
            self._reap()


def _load_for_first(control: socket.socket) -> None:
    """Import what the first message asks for, if it has come, and leave the message there.

    Until a server is `Ready`, those who give it up kill it. From then on they wait for its answers, and while
    it imports there is none.
    """
    with suppress(OSError):  # None has come, or the supervisor is gone, which is seen later.
        if data := control.recv(_MESSAGE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            message: Message = pickle.loads(data)
            if isinstance(message, RankPlace | Load | Branch):
                _load(message.entry)


def _load(entry: str) -> None:
    """Import the module of an entry, unless it is the user's: that may do anything."""
    module = entry.partition(":")[0]
    if module.startswith(_OWN):
        with suppress(ImportError, OSError):  # The rank says why.
            import_module(module)
