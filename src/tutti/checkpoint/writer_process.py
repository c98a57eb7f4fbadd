"""The process that writes checkpoints during training. It imports neither torch nor numpy.

rank       snapshot │ train ...              │ snapshot │ train ...
process             └ writes, at nice 19 ┘ answers
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, cast

from tutti.records.checkpoints import (
    Manifest,
    commit,
    remove,
    remove_unfinished,
    tidy,
    unfinished_folder,
    write_file,
)

PROGRAM: Final = (
    "import json, sys; parent, connection, sys.path[:] = json.loads(sys.argv[1]); "
    "from tutti.checkpoint.writer_process import main; main(parent, connection)"
)
"""The program of the process: with the rank's search path it finds the same modules."""

_PR_SET_PDEATHSIG: Final = 1
_NICEST: Final = 19


@dataclass(frozen=True)
class Order:
    """A checkpoint to be written."""

    memory: str  # the path of the file that has the snapshot
    folder: Path
    attempt: str  # distinguishes it from others of the same step
    files: dict[str, tuple[int, int]]  # offset and size in the memory of each file
    step: int
    ranks: int
    keep: int
    score: float | None = None


@dataclass(frozen=True)
class WriterAnswer:
    """The outcome of an order."""

    step: int
    whole: bool  # the checkpoint is on the disk
    error: str | None = None


def main(parent: int, descriptor: int) -> None:
    """Carry out orders until the parent ends (entry point of the process)."""
    # A signal to all processes of the job asks the ranks to stop, and they save once more then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    os.nice(_NICEST)
    with suppress(EOFError, ConnectionError), Connection(descriptor) as orders:
        while True:
            orders.send(_carry_out(orders.recv()))


def _carry_out(order: Order) -> WriterAnswer:
    whole, problem = False, None
    try:
        write_checkpoint(order)
        whole = True
        tidy(order.folder, order.step, order.keep)
    except OSError as error:
        problem = f"cannot write {error.filename or order.folder}: {error.strerror}"
    return WriterAnswer(order.step, whole, problem)


def write_checkpoint(order: Order) -> None:
    """Write the files of a checkpoint, and commit it."""
    unfinished = unfinished_folder(order.folder, order.step, order.attempt)
    memory = os.open(order.memory, os.O_RDONLY)
    try:
        remove_unfinished(order.folder)
        unfinished.mkdir()
        files = {
            name: write_file(unfinished / name, memory, offset, size)
            for name, (offset, size) in order.files.items()
        }
        commit(unfinished, Manifest(order.step, order.ranks, files, order.score))
    except OSError:
        with suppress(OSError):
            remove(unfinished)
        raise
    finally:
        os.close(memory)


_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""The variables of the environment that the process gets: with others it would take itself for a rank."""


class Writer:
    """The process that writes checkpoints; it starts with the first one, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._step: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it was writing at the last `poll`."""
        return self._step is not None

    def give(self, order: Order) -> None:
        """Order a checkpoint; call this only when it is not busy."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        self._step = order.step
        with suppress(ConnectionError):  # `poll` reports that the process is gone
            self._connection.send(order)

    def poll(self, timeout_s: float | None = 0.0) -> WriterAnswer | None:
        """Return the outcome of the order, once; None: there is none yet. No limit: wait."""
        if self._step is None or self._connection is None or not self._connection.poll(timeout_s):
            return None
        step, self._step = self._step, None
        try:
            return cast("WriterAnswer", self._connection.recv())
        except (EOFError, ConnectionError):
            self.close()
            return WriterAnswer(step, False, "the process that writes it was killed")

    def close(self) -> None:
        """End the process at once."""
        self._step = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._connection, theirs = Pipe()
        with theirs:
            start = [os.getpid(), theirs.fileno(), [str(path) for path in sys.path]]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(start)],
                stdin=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the ranks
            )
