"""The lock on a run folder: one job at a time writes it. Needs neither torch nor MPI."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.files import WITHOUT_LOCKS, refusing
from tutti.records.json_lines import Record, parse_record, to_json

LOCK: Final = ".lock"

_PROBE_S: Final = 0.01
_OWNER_BYTES: Final = 4096

_open: set[int] = set()
"""The files of this process with locks."""


@dataclass(frozen=True)
class FolderOwner(Record):
    """The process that has the lock on a run folder."""

    process: int
    host: str


class FolderLock:
    """The lock on a run folder, which one job has at a time; taken here, and released as a context manager.

    The kernel releases it when the process ends, however it does. On NFS that is the server's, so that it
    holds between hosts.

    Args:
        folder: the folder, which exists.
        patience_s: how long to wait for processes of the same job that were killed to be gone.

    Attributes:
        problem: why the file system has no locks; None: it has.

    Raises:
        BadRunFolder: another job has it; or the file of the lock cannot be written.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        self.problem: str | None = None
        until = time.monotonic() + patience_s
        with refusing(folder / LOCK):
            self._file = open_lock_file(folder / LOCK)
        try:
            while not self._take():
                if time.monotonic() >= until:
                    raise _held(self._file, folder)
                time.sleep(_PROBE_S)
        except BaseException:
            self.__exit__()
            raise
        owner = to_json(FolderOwner(os.getpid(), socket.gethostname())).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, owner, 0)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        close_lock_file(self._file)

    def _take(self) -> bool:
        try:
            return lock_byte(self._file)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            self.problem = error.strerror
            return True


def open_lock_file(path: Path) -> int:
    """Open a file to lock bytes of it; it is made if there is none."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _open.add(file)
    return file


def close_lock_file(file: int) -> None:
    """Give back all locks on a file, and close it."""
    _open.discard(file)
    os.close(file)


def lock_byte(file: int, at: int = 0) -> bool:
    """Lock a byte of a file; return False if somebody else has it. It need not be there."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, at))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock_byte(file: int, at: int) -> None:
    """Give the lock on a byte back."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, at))


def _request(kind: int, at: int = 0) -> bytes:
    # struct flock of 64-bit Linux.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)


def _leave_locks_to_parent() -> None:
    # A lock belongs to all who have the file open as this process has.
    for file in _open:
        os.close(file)
    _open.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def refuse_locked(folder: Path) -> None:
    """Raise BadRunFolder if a job writes the folder; nothing is changed."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        (kind,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK)))
        if kind != fcntl.F_UNLCK:
            raise _held(file, folder)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    finally:
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Return whether a job writes the folder."""
    try:
        refuse_locked(folder)
    except BadRunFolder:
        return True
    return False


def _held(file: int, folder: Path) -> BadRunFolder:
    try:
        owner = parse_record(os.pread(file, _OWNER_BYTES, 0), FolderOwner)
        who = f"process {owner.process} on host {owner.host}"
    except ValueError:
        who = "another job"  # which is about to write who it is
    return BadRunFolder(
        f"run folder {folder} is being written by {who}; wait until that has ended, or name another folder "
        "with --out"
    )
