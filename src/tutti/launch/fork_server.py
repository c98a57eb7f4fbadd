"""A process that has torch imported and forks the ranks: the import takes seconds, a fork milliseconds.

    supervisor ──Fork, EndRanks──▶ fork server ──fork──▶ rank 0, rank 1, ...
               ◀──Ended, Ready──

It computes nothing itself, so that every rank begins like a process that has just been started, whatever the
ranks before it did. It ends with the supervisor, or when that closes the socket, or after `IDLE_S` without
ranks; processes that ranks have left running end before it.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import selectors
import signal
import socket
import time
import warnings
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Final

from tutti.launch.orphans import adopt_orphans, die_with_parent, outlive_parent, parents_of_processes

BOOT: Final = "TUTTI_FORK_SERVER"
"""The environment variable that holds the `ServerSettings`; removed from the environment first of all."""

PROGRAM: Final = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ['{BOOT}'])['path']; "
    "from tutti.launch.fork_server import main; main()"
)
"""The program of a fork server: with the supervisor's search path it finds the same modules."""

IDLE_S: Final = 300.0
"""After how long without ranks a fork server ends."""

GRACE_S: Final = 1.0
"""How long ranks, and what they have started, may take to exit on SIGTERM, before SIGKILL."""

_MESSAGE_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 8
_POLL_S: Final = 0.01
_OWN: Final = "tutti."


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a fork server, from the supervisor.

    Attributes:
        supervisor: the process that has started it.
        control: the descriptor of the socket between them.
        path: `sys.path` of the supervisor.
        idle_s: after how long without ranks it ends.
    """

    supervisor: int
    control: int
    path: list[str]
    idle_s: float

    def as_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in the job. The descriptors are sent with it.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        entry: the function to run, as "package.module:function".
        block: the offset of the world's control block in the arena.
        threads: how many threads torch may use.
        cores: the logical CPUs to run on.
    """

    rank: int
    size: int
    entry: str
    block: int
    threads: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Descriptors:
    """The open files that a rank gets.

    Attributes:
        arena: the host's shared memory.
        job: the file with the pickled `tutti.launch.rank_main.RankJob`.
        reports: the pipe for its report.
        output: what becomes its standard output.
        errors: what becomes its standard error.
    """

    arena: int
    job: int
    reports: int
    output: int
    errors: int

    def as_list(self) -> list[int]:
        """All of them."""
        return [self.arena, self.job, self.reports, self.output, self.errors]

    def close(self) -> None:
        """Close them in this process."""
        for descriptor in self.as_list():
            os.close(descriptor)


@dataclass(frozen=True)
class Fork:
    """Fork a rank."""

    start: RankPlace


@dataclass(frozen=True)
class EndRanks:
    """End all ranks, and all that they have started: SIGTERM, and after `grace_s` seconds SIGKILL."""

    grace_s: float


@dataclass(frozen=True)
class RankEnded:
    """A rank has ended, with this exit code or by minus this signal."""

    rank: int
    returncode: int


@dataclass(frozen=True)
class Ready:
    """There is no rank, nor anything that one has started: sent at the beginning, and after `EndRanks`."""


Message = Fork | EndRanks | RankEnded | Ready


def send(control: socket.socket, message: Message, descriptors: Descriptors | None = None) -> None:
    """Send a message, with a rank's descriptors if it is about one.

    Raises:
        OSError: the other side is gone.
    """
    socket.send_fds(control, [pickle.dumps(message)], descriptors.as_list() if descriptors else [])


def receive(control: socket.socket) -> tuple[Message | None, Descriptors | None]:
    """Return the next message and the descriptors that came with it; None when the other side is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(
            control, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None, None
    if not data:
        return None, None
    message: Message = pickle.loads(data)
    return message, Descriptors(*descriptors) if descriptors else None


def main() -> None:
    """Be the fork server, and in every process that it forks a rank."""
    boot = ServerSettings(**json.loads(os.environ.pop(BOOT)))
    # While it imports torch, it does not watch the supervisor's pidfd: the kernel does that for it.
    die_with_parent(boot.supervisor)
    # Ctrl-C reaches the whole foreground group; what it means is for the supervisor to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The supervisor has started this process with SIGINT blocked; it is ignored before it is let through.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Imported modules stay: collecting garbage meanwhile takes a sixth of the time until ranks start.
    gc.disable()
    import torch  # noqa: F401

    # From here on the supervisor's pidfd tells that it is gone, which leaves time to end the ranks.
    # Besides, the kernel's signal would come when only the *thread* ends that has started this process.
    outlive_parent()
    # A rank may die before the processes that it has started: they then become children of this one, not of
    # init, and `_clear` finds and ends them.
    adopt_orphans()
    found = ForkServerProcess(boot).serve()
    if found is not None:
        gc.enable()
        from tutti.launch.rank_main import run

        run(*found)
    else:
        # There is nothing to clean up, and taking torch down takes time.
        os._exit(0)


@dataclass
class ForkServerProcess:
    """The fork server's own side."""

    boot: ServerSettings
    _ranks: dict[int, int] = field(default_factory=dict)
    _childless: bool = True

    def serve(self) -> tuple[RankPlace, Descriptors] | None:
        """Fork ranks until no more are wanted; returns in each rank, and at the end in this process."""
        boot = self.boot
        with ExitStack() as stack:
            control = stack.enter_context(socket.socket(fileno=boot.control))
            control.set_inheritable(False)
            supervisor = os.pidfd_open(boot.supervisor)
            stack.callback(os.close, supervisor)
            # If it ended before the pidfd was opened, its number may be another's: look who the parent is.
            if os.getppid() != boot.supervisor:
                return None
            children = stack.enter_context(_ChildWatch())
            selector = stack.enter_context(selectors.DefaultSelector())
            for one in (control, supervisor, children):
                selector.register(one, selectors.EVENT_READ)
            send(control, Ready())
            try:
                return self._serve(control, supervisor, children, selector)
            except (BrokenPipeError, ConnectionResetError):
                # The supervisor is gone, as a message to it has shown.
                self._kill_ranks()
                self._clear(GRACE_S)
                return None

    def _serve(
        self,
        control: socket.socket,
        supervisor: int,
        children: _ChildWatch,
        selector: selectors.BaseSelector,
    ) -> tuple[RankPlace, Descriptors] | None:
        while True:
            ready = [key.fileobj for key, _ in selector.select(None if self._ranks else self.boot.idle_s)]
            if children in ready:
                # Drain first: a child that ends between the two calls wakes the selector again.
                children.drain()
                for ended in self._reap():
                    send(control, ended)
            message, descriptors = receive(control) if control in ready else (None, None)
            if isinstance(message, Fork):
                assert descriptors is not None, "a rank's descriptors come with its start"
                if self._fork(message.start):
                    return message.start, descriptors
                descriptors.close()
            elif isinstance(message, EndRanks):
                self._clear(message.grace_s)
                send(control, Ready())
            elif control in ready or supervisor in ready:
                self._kill_ranks()
                self._clear(GRACE_S)
                return None
            elif not ready and not self._ranks:
                return None

    def _fork(self, start: RankPlace) -> bool:
        """Fork a rank; returns True in the rank, False in this process."""
        module = start.entry.partition(":")[0]
        if module.startswith(_OWN):
            with suppress(ImportError):  # The rank says why.
                import_module(module)
        own = os.getpid()
        # A rank that looks for garbage in what is here, as each does at its end, copies it all.
        gc.freeze()
        with warnings.catch_warnings():
            # From 3.12 on Python warns of threads; libraries that have some here prepare them for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            # The server forks in its main thread: so this signal comes when the process ends, not before.
            die_with_parent(own)
            return True
        self._ranks[process] = start.rank
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
            rank = self._ranks.pop(process, None)
            if rank is not None:
                ended.append(RankEnded(rank, os.waitstatus_to_exitcode(status)))

    def _kill_ranks(self) -> None:
        for process in self._ranks:
            _signal(process, signal.SIGKILL)

    def _clear(self, grace_s: float) -> None:
        """End all children; those of a child that has ended become ours."""
        deadline = time.monotonic() + grace_s
        asked: set[int] = set()
        self._reap()
        while not self._childless:
            late, own = time.monotonic() >= deadline, os.getpid()
            children = [child for child, parent in parents_of_processes().items() if parent == own]
            for child in children:
                if late or child not in asked:
                    _signal(child, signal.SIGKILL if late else signal.SIGTERM)
            asked.update(children)
            time.sleep(_POLL_S)
            self._reap()


class _ChildWatch:
    """A descriptor that wakes a selector when a child ends."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> _ChildWatch:
        # Without a handler the signal is discarded, and nothing is written to the descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._reading)
        os.close(self._writing)

    def fileno(self) -> int:
        """A descriptor that is readable once a child has ended."""
        return self._reading

    def drain(self) -> None:
        """Acknowledge the children that have ended so far."""
        with suppress(BlockingIOError):
            while os.read(self._reading, 1 << 10):
                pass


def _signal(process: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signum)
