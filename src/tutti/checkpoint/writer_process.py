"""The process that writes checkpoints beside training. It imports neither torch nor numpy.

    rank      snapshot │ train ...                                     │ snapshot │ train ...
    process            └─ a child at idle priority writes the files ─┐
                                                                     └─ manifest, rename, `latest`, old ones

It gets orders through a socket, each with the descriptor of the memory that has the snapshot, and answers
each with one line. On a machine where all cores are busy a process at idle priority may get no time at all:
when it has not done in time what a slow disk would have, its parent does it at the priority of training.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tutti.records.checkpoints import (
    FileEntry,
    Manifest,
    commit,
    remove,
    remove_unfinished,
    unfinished_folder,
    write_file,
)
from tutti.records.json_lines import Record, decode, parse_record, to_json

PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from tutti.checkpoint.writer_process import main; main()"
)
"""The program of the process: with the rank's search path it finds the same modules."""

LENGTH_BYTES: Final = 8
"""The size of the number before each order that says how long it is; the descriptor comes with it."""

PATIENCE_S: Final = 5.0
SLOWEST_BYTES_PER_S: Final = 50e6
"""The time that files get at idle priority, and for each byte of them in addition."""

KILLED: Final = "the process that writes it was killed"

_LOOK_S: Final = 0.05
"""How often to look whether other hosts are done."""

_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class WriterStart(Record):
    """The argument of the process, as JSON.

    Attributes:
        parent: the rank that starts it.
        path: `sys.path` of the rank.
        connection: the descriptor of the socket.
    """

    parent: int
    path: list[str]
    connection: int


@dataclass(frozen=True)
class Stretch(Record):
    """A file of a checkpoint: where it lies in the snapshot's memory."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Order(Record):
    """A checkpoint to be written.

    Attributes:
        folder: where the checkpoints are.
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
    attempt: str
    files: list[Stretch]
    host: int
    hosts: int
    step: int
    ranks: int
    score: float | None
    keep: int


@dataclass(frozen=True)
class Answer(Record):
    """The outcome of an order.

    Attributes:
        step: of the checkpoint.
        error: what has failed; None: the files are written, and the checkpoint is whole if this is host 0.
        seconds: how long it took.
    """

    step: int
    error: str | None
    seconds: float


@dataclass(frozen=True)
class _Written(Record):
    """The files that one host has written."""

    files: dict[str, FileEntry]


def main() -> None:
    """Write what is ordered until the parent is gone (entry point of the process)."""
    # A signal to all processes of the job asks the ranks to stop, and they save once more then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    start = parse_record(sys.argv[1], WriterStart)
    _die_with(start.parent)
    connection = socket.socket(fileno=start.connection)
    while (received := _receive(connection)) is not None:
        order, memory = received
        begun = time.monotonic()
        try:
            error = _write(order, memory)
        finally:
            os.close(memory)
        answer = Answer(order.step, error, time.monotonic() - begun)
        with suppress(BrokenPipeError):  # the rank has just ended
            connection.sendall(to_json(answer).encode() + b"\n")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _receive(connection: socket.socket) -> tuple[Order, int] | None:
    """Return the next order and its memory; None: there is none any more."""
    length, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 1)
    if not length:
        return None
    with connection.makefile("rb", buffering=0) as stream:
        length += _exactly(stream, LENGTH_BYTES - len(length))
        return parse_record(_exactly(stream, int.from_bytes(length, "little")), Order), descriptors[0]


def _exactly(stream: socket.SocketIO, count: int) -> bytes:
    read = b""
    while len(read) < count:
        more = stream.read(count - len(read))
        if not more:
            raise EOFError("the rank has ended in the middle of an order")
        read += more
    return read


def _write(order: Order, memory: int) -> str | None:
    """Write this host's files, and as host 0 make the checkpoint whole; returns what has failed."""
    folder = Path(order.folder)
    unfinished = unfinished_folder(folder, order.step, order.attempt)
    try:
        if order.host == 0:
            remove_unfinished(folder, but=unfinished)
        unfinished.mkdir(exist_ok=True)
        written = _written_at_idle(order, memory, unfinished)
        if order.host:
            _tell(unfinished, order.host, written)
            return None
        files = {**written, **_of_others(order, unfinished)}
        commit(unfinished, Manifest(order.step, order.ranks, files, order.score), order.keep)
    except OSError as error:
        with suppress(OSError):
            remove(unfinished)
        return f"cannot write {error.filename or folder}: {error.strerror}" if error.errno else str(error)
    return None


def _written_at_idle(order: Order, memory: int, unfinished: Path) -> dict[str, FileEntry]:
    """Write the files in a child at idle priority; here, if it gets too little time."""
    reading, writing = os.pipe()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            _die_with(me)
            _idle()
            try:
                result: object = asdict(_Written(_write_files(order, memory, unfinished)))
            except OSError as error:
                result = [error.errno, error.strerror, str(error.filename or order.folder)]
            with open(writing, "wb") as stream:
                stream.write(json.dumps(result).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    size = sum(stretch.size for stretch in order.files)
    with open(reading, "rb") as stream:
        in_time, _, _ = select.select([stream], [], [], PATIENCE_S + size / SLOWEST_BYTES_PER_S)
        text = stream.read() if in_time else b""
    if not in_time:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not in_time:
        return _write_files(order, memory, unfinished)
    if not text:
        raise ChildProcessError(KILLED)
    result = json.loads(text)
    if isinstance(result, list):
        raise OSError(*result)
    return decode(_Written, result).files


def _idle() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)


def _write_files(order: Order, memory: int, unfinished: Path) -> dict[str, FileEntry]:
    return {
        stretch.name: write_file(unfinished / stretch.name, memory, stretch.offset, stretch.size)
        for stretch in order.files
    }


def _tell(unfinished: Path, host: int, written: dict[str, FileEntry]) -> None:
    """Tell host 0 that this one is done."""
    path = unfinished / f"host-{host}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(to_json(_Written(written)))
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
