"""Locks on folders: one job at a time writes a run folder. Needs neither torch nor MPI."""

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
    """The process that has the lock on a folder."""

    process: int
    host: str


class FolderInUse(BadRunFolder):
    """Another job has the lock on a folder."""


class FolderLock:
    """The lock on a folder, which one job has at a time; taken here, and released as a context manager.

    The kernel releases it when the process ends in any way. On NFS that is the server's, so that it holds
    between hosts. Attribute `problem`: why the file system has no locks; None: it has.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0, name: str = LOCK) -> None:
        self.problem: str | None = None
        until = time.monotonic() + patience_s
        with refusing(folder / name):
            self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _open.add(self._file)
        try:
            while not self._take():
                if time.monotonic() >= until:
                    raise _held(self._file, folder)
                time.sleep(_PROBE_S)
        except BaseException:
            self.release()
            raise
        owner = to_json(FolderOwner(os.getpid(), socket.gethostname())).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, owner, 0)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock."""
        _open.discard(self._file)
        os.close(self._file)

    def _take(self) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _REQUEST)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            self.problem = error.strerror
        return True


# struct flock of 64-bit Linux: the first byte of the file, which need not be there.
_REQUEST: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


def _leave_locks_to_parent() -> None:
    # A lock belongs to all who have the file open as this process has.
    for file in _open:
        os.close(file)
    _open.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def refuse_locked(folder: Path) -> None:
    """Raise FolderInUse if a job has the lock on a folder; nothing is changed."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        (kind,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_OFD_GETLK, _REQUEST))
        if kind != fcntl.F_UNLCK:
            raise _held(file, folder)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    finally:
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Return whether a job is writing the folder."""
    try:
        refuse_locked(folder)
    except FolderInUse:
        return True
    return False


def _held(file: int, folder: Path) -> FolderInUse:
    try:
        owner = parse_record(os.pread(file, _OWNER_BYTES, 0), FolderOwner)
        who = f"process {owner.process} on host {owner.host}"
    except ValueError:
        who = "another job"  # which is about to write who it is
    return FolderInUse(
        f"run folder {folder} is being written by {who}; wait until that has ended, or name another folder "
        "with --out"
    )
