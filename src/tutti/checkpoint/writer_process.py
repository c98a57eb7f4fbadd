"""The process that writes checkpoints beside training. It imports neither torch nor numpy.

    rank       snapshot │ train ...                                            │ snapshot │ train ...
    process             └ hands it on ┐                             ┌ answers ─┘
    its child                         └ writes, at idle priority ───┘

It gets orders through a socket, each with the descriptor of the memory that has the snapshot, and answers
each with one line. On a machine whose cores are all busy a process at idle priority gets hardly any time:
when it has not done in time what even a slow disk would have, its parent does it at the priority of training.

For a slow disk, and for other hosts, both and the rank wait as long as it takes. But a process that is
stopped, and stays so, is given up like one that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

from tutti.records.checkpoints import (
    FileEntry,
    Manifest,
    commit,
    remove,
    remove_unfinished,
    tidy,
    unfinished_folder,
    write_file,
)
from tutti.records.json_lines import Record, decode, parse_record, to_json

PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from tutti.checkpoint.writer_process import main; main()"
)
"""The program of the process: with the rank's search path it finds the same modules."""

_LENGTH_BYTES: Final = 8
"""The size of the number before each order that says how long it is; the descriptor comes with it."""

PATIENCE_S: Final = 5.0
SLOWEST_BYTES_PER_S: Final = 50e6
"""Time that files get at idle priority: some seconds, and what they take at this rate.

A process that is stopped has the former to go on.
"""

KILLED: Final = "the process that writes it was killed"

_LOOK_S: Final = 0.05
"""Pause between two looks whether other hosts are done."""

_STOP_LOOK_S: Final = 0.5
"""Pause between two looks whether a process is stopped."""

_PR_SET_PDEATHSIG: Final = 1
_NICEST: Final = 19


@dataclass(frozen=True)
class WriterStart(Record):
    """The argument of the process, as JSON.

    Attributes:
        parent: the rank that starts it.
        path: `sys.path` of the rank.
        connection: the descriptor of the socket.
        patience_s: as in `tutti.checkpoint.writer.Writer`.
    """

    parent: int
    path: list[str]
    connection: int
    patience_s: float


@dataclass(frozen=True)
class MemoryStretch(Record):
    """A file of a checkpoint: where it lies in the snapshot's memory."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Order(Record):
    """A checkpoint to be written.

    Attributes:
        folder: where the checkpoints are.
        inode: the number of this folder: another one in its place is of another run; None: not on host 0.
        attempt: names the attempt to write it, equally on all hosts.
        files: those that this host writes.
        host: this host's number.
        hosts: how many write. Number 0 makes it whole when all have written.
        step: as in `tutti.records.checkpoints.Manifest`.
        ranks: likewise.
        score: likewise.
        keep: how many of the last ones are kept.
    """

    folder: str
    inode: int | None
    attempt: str
    files: list[MemoryStretch]
    host: int
    hosts: int
    step: int
    ranks: int
    score: float | None
    keep: int


@dataclass(frozen=True)
class WriterAnswer(Record):
    """The outcome of an order.

    Attributes:
        step: of the checkpoint.
        error: what has failed; None: the files are written, and the checkpoint is whole if this is host 0.
        left: what could not be put in order after that; None: nothing.
    """

    step: int
    error: str | None
    left: str | None = None


@dataclass(frozen=True)
class _Written(Record):
    """The files that one host has written."""

    files: dict[str, FileEntry]


def main() -> None:
    """Have written what is ordered, until the parent is gone (entry point of the process)."""
    # A signal to all processes of the job asks the ranks to stop, and they save once more then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    start = decode(WriterStart, json.loads(sys.argv[1]))
    _die_with(start.parent)
    orders = socket.socket(fileno=start.connection)
    child = _Child(orders, start.patience_s)
    while (received := _receive(orders)) is not None:
        text, memory = received
        if child.is_gone():
            child = _Child(orders, start.patience_s)
        line = child.answer(text, memory)
        if line is None:
            child.end()
            line = _carried_out(text, memory)
        if child.ended:
            child = _Child(orders, start.patience_s)
        os.close(memory)
        with suppress(BrokenPipeError):  # the rank has just ended
            orders.sendall(line)


class StopWatch:
    """Tells when a child of this process is stopped, as by SIGSTOP, and stays so.

    It reads no file: a rank that waits here is to be seen doing nothing.

    Args:
        child: the process.
        patience_s: how long it may be stopped.

    Attributes:
        over: for as long as that every look has found it stopped.
    """

    def __init__(self, child: int, patience_s: float) -> None:
        self._child, self._patience_s = child, patience_s
        self._since: float | None = None
        self.over = False

    @property
    def failure(self) -> str:
        """Why what the child was to write is not there, if it is `over`."""
        return (
            f"process {self._child}, which writes it, was stopped (SIGSTOP) for {self._patience_s:g} s, and "
            "another one takes its place (suspend all processes of a run, or none)"
        )

    def look(self) -> None:
        """Look at the child."""
        if not _is_stopped(self._child):
            self._since = None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self.over = now - self._since >= self._patience_s


class _Child:
    """A process at idle priority that writes checkpoints.

    Attributes:
        ended: it cannot be used any more.
    """

    def __init__(self, orders: socket.socket, patience_s: float) -> None:
        """Start one.

        Args:
            orders: the socket of this process, which is none of the child's.
            patience_s: as in `WriterStart`.
        """
        self._patience_s = patience_s
        me, (self._connection, theirs) = os.getpid(), socket.socketpair()
        self.ended = False
        self._process = os.fork()
        if self._process == 0:
            try:
                _die_with(me)
                orders.close()
                self._connection.close()
                _be_idle()
                _serve(theirs)
            except BaseException:
                sys.excepthook(*cast("tuple[type[BaseException], BaseException, None]", sys.exc_info()))
            finally:
                os._exit(1)
        theirs.close()

    def answer(self, text: bytes, memory: int) -> bytes | None:
        """Hand an order on; returns the line of the answer, None if the files are not written in time."""
        order, stops = _order(text), StopWatch(self._process, self._patience_s)
        with suppress(BrokenPipeError, ConnectionResetError), self._connection.makefile("rb") as lines:
            _send(self._connection, text, memory)
            nbytes = sum(file.size for file in order.files)
            if not is_ready(self._connection, self._patience_s + nbytes / SLOWEST_BYTES_PER_S, stops):
                return None
            # Past `lines`, which would take more than the empty line out of the socket.
            written = self._connection.recv(1) and is_ready(self._connection, None, stops)
            if written and (line := lines.readline()):
                return line
        self.end()
        return _line(WriterAnswer(order.step, stops.failure if stops.over else KILLED))

    def is_gone(self) -> bool:
        """Tell whether it was killed when it had nothing to do."""
        self.ended = os.waitpid(self._process, os.WNOHANG) != (0, 0)
        return self.ended

    def end(self) -> None:
        """End it, whatever it does."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._connection.close()
        self.ended = True


def send_order(connection: socket.socket, order: Order, memory: int) -> None:
    """Send an order, and the descriptor of the memory that it is about."""
    _send(connection, json.dumps(asdict(order)).encode(), memory)


def is_ready(connection: socket.socket, timeout_s: float | None, stops: StopWatch) -> bool:
    """Wait until there is something to receive, or the other side is gone.

    Args:
        connection: whatever number its descriptor has: a rank may have thousands.
        timeout_s: how long to wait; None: as long as it takes, unless the other side is stopped.
        stops: looks at the process on the other side.
    """
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not waiting.poll(1e3 * max(0.0, min(deadline - time.monotonic(), _STOP_LOOK_S))):
        stops.look()
        if stops.over or time.monotonic() >= deadline:
            return False
    return True


def _is_stopped(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it is gone, or was started by the process that this one was forked from
        return False


def _send(connection: socket.socket, text: bytes, memory: int) -> None:
    socket.send_fds(connection, [len(text).to_bytes(_LENGTH_BYTES, "little")], [memory])
    connection.sendall(text)


def _receive(connection: socket.socket) -> tuple[bytes, int] | None:
    """Return the text of the next order and its memory; None: there is none any more."""
    try:
        length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 1)
    except ConnectionResetError:  # the rank was killed, and had not read its last answer
        return None
    if not length:
        return None
    length += _exactly(connection, _LENGTH_BYTES - len(length))
    return _exactly(connection, int.from_bytes(length, "little")), descriptors[0]


def _exactly(connection: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        more = connection.recv(count - len(read))
        if not more:
            raise EOFError("the rank has ended in the middle of an order")
        read += more
    return read


def _serve(connection: socket.socket) -> None:
    """Carry out orders; an empty line says that the files are written, the next one is the answer."""
    while (received := _receive(connection)) is not None:
        text, memory = received
        connection.sendall(_carried_out(text, memory, lambda: connection.sendall(b"\n")))
        os.close(memory)


def _carried_out(text: bytes, memory: int, written: Callable[[], None] = lambda: None) -> bytes:
    """Carry out an order, calling `written` when the files are; returns the line of the answer."""
    order = _order(text)
    error = _write(order, memory, written)
    left = None if error is not None or order.host else _tidied(order)
    return _line(WriterAnswer(order.step, error, left))


def _order(text: bytes) -> Order:
    # Paths as they are, whatever a terminal makes of them.
    return decode(Order, json.loads(text))


def _line(answer: WriterAnswer) -> bytes:
    return json.dumps(asdict(answer)).encode() + b"\n"


def _write(order: Order, memory: int, written: Callable[[], None]) -> str | None:
    """Write this host's files, and as host 0 make the checkpoint whole; returns what has failed."""
    folder = Path(order.folder)
    unfinished = unfinished_folder(folder, order.step, order.attempt)
    failure, files = None, dict[str, FileEntry]()
    try:
        if order.host == 0:
            if folder.stat().st_ino != order.inode:
                raise OSError(errno.ESTALE, "it was removed, and another one is in its place", str(folder))
            remove_unfinished(folder, but=unfinished)
        unfinished.mkdir(exist_ok=True)
        for file in order.files:
            files[file.name] = write_file(unfinished / file.name, memory, file.offset, file.size)
    except OSError as error:
        failure = error
    written()
    try:
        if failure is not None:
            raise failure
        if order.host:
            _tell(unfinished, order.host, files)
        else:
            files |= _of_others(order, unfinished)
            commit(unfinished, Manifest(order.step, order.ranks, files, order.score))
    except OSError as error:
        with suppress(OSError):
            remove(unfinished)
        return f"cannot write {error.filename or folder}: {error.strerror}"
    return None


def _tidied(order: Order) -> str | None:
    """Put the checkpoints in order now that there is a new one; returns what has failed."""
    try:
        tidy(Path(order.folder), order.step, order.keep)
    except OSError as error:
        return f"cannot change {error.filename or order.folder}: {error.strerror}"
    return None


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _be_idle() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(_NICEST)


def _tell(unfinished: Path, host: int, files: dict[str, FileEntry]) -> None:
    """Tell host 0 that this one is done."""
    path = unfinished / f"host-{host}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(to_json(_Written(files)))
    temporary.rename(path)


def _of_others(order: Order, unfinished: Path) -> dict[str, FileEntry]:
    """Wait for the other hosts; returns what they have written."""
    files: dict[str, FileEntry] = {}
    for host in range(1, order.hosts):
        path = unfinished / f"host-{host}.json"
        while not path.exists():
            time.sleep(_LOOK_S)
        files |= parse_record(path.read_bytes(), _Written).files
        path.unlink()
    return files
