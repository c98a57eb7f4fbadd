"""The process that writes a host's checkpoints beside training. It imports neither torch nor numpy.

rank       snapshot │ train ...              │ snapshot │ train ...
process             └ writes, at nice 19 ┘ answers
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

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
from tutti.records.json_lines import Record, parse_record, to_json

PROGRAM: Final = (
    "import json, sys; parent, connection, sys.path[:] = json.loads(sys.argv[1]); "
    "from tutti.checkpoint.writer_process import main; main(parent, connection)"
)
"""The program of the process: with the rank's search path it finds the same modules."""

_LOOK_S: Final = 0.05
"""Pause between two looks whether other hosts are done."""

_PR_SET_PDEATHSIG: Final = 1
_NICEST: Final = 19


@dataclass(frozen=True)
class Order:
    """A checkpoint to be written."""

    memory: str  # the path of the file that has the snapshot
    folder: Path
    attempt: str  # equal on all hosts
    files: dict[str, tuple[int, int]]  # offset and size in the memory of each file of this host
    step: int
    ranks: int
    keep: int
    score: float | None = None
    host: int = 0  # host 0 commits the checkpoint when all have written
    hosts: int = 1


@dataclass(frozen=True)
class WriterAnswer:
    """The outcome of an order."""

    step: int
    error: str | None  # None: this host's files are written, and on host 0 the checkpoint is whole
    left: str | None = None  # what could not be tidied up afterwards


@dataclass(frozen=True)
class _Written(Record):
    """The files that one host has written."""

    files: dict[str, FileEntry]


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
    try:
        write_checkpoint(order)
    except OSError as error:
        return WriterAnswer(order.step, f"cannot write {error.filename or order.folder}: {error.strerror}")
    left = None
    if order.host == 0:
        try:
            tidy(order.folder, order.step, order.keep)
        except OSError as error:
            left = f"cannot change {error.filename or order.folder}: {error.strerror}"
    return WriterAnswer(order.step, None, left)


def write_checkpoint(order: Order) -> None:
    """Write this host's files; on host 0 commit the checkpoint once all hosts have written."""
    unfinished = unfinished_folder(order.folder, order.step, order.attempt)
    memory = os.open(order.memory, os.O_RDONLY)
    try:
        if order.host == 0:
            remove_unfinished(order.folder, but=unfinished)
        unfinished.mkdir(exist_ok=True)
        files = {
            name: write_file(unfinished / name, memory, offset, size)
            for name, (offset, size) in order.files.items()
        }
        if order.host:
            _report(unfinished, order.host, files)
        else:
            files |= _of_other_hosts(order.hosts, unfinished)
            commit(unfinished, Manifest(order.step, order.ranks, files, order.score))
    except OSError:
        with suppress(OSError):
            remove(unfinished)
        raise
    finally:
        os.close(memory)


def _report(unfinished: Path, host: int, files: dict[str, FileEntry]) -> None:
    """Leave the entries of this host's files for host 0."""
    path = unfinished / f"host-{host}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(to_json(_Written(files)))
    temporary.rename(path)


def _of_other_hosts(hosts: int, unfinished: Path) -> dict[str, FileEntry]:
    """Wait for the other hosts; returns the entries of their files."""
    files: dict[str, FileEntry] = {}
    for host in range(1, hosts):
        path = unfinished / f"host-{host}.json"
        while not path.exists():
            time.sleep(_LOOK_S)
        files |= parse_record(path.read_bytes(), _Written).files
        path.unlink()
    return files
