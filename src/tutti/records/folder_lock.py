"""The lock on a run folder: one job at a time writes it. Needs neither torch nor MPI."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.files import WITHOUT_LOCKS, is_at, refusing
from tutti.records.json_lines import Record, parse_record, to_json

LOCK: Final = ".lock"


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
        patience_s: how long processes of the same job that were killed may take to be gone, which may have
            it yet, though they write no more. It is taken meanwhile, and `lost` is true if that comes to
            nothing.

    Attributes:
        problem: why the file system has no locks; None: it has.

    Raises:
        BadRunFolder: another job has it; or the file of the lock cannot be written.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        self.problem: str | None = None
        self._until = time.monotonic() + patience_s if patience_s else None
        self._waits: threading.Thread | None = None
        self._path, self._at = folder / LOCK, str(folder)
        with refusing(self._path):
            # As long as it is open no other folder gets its number.
            self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._file = self._take()
            except BaseException:
                os.close(self._folder)
                raise
        _locks.add(self._file)

    def __enter__(self) -> FolderLock:
        return self

    @property
    def lost(self) -> bool:
        """True if the folder at this path is gone, or another one by now, or another job has its lock."""
        late = self._until is not None and time.monotonic() > self._until and not self._has_come()
        return late or not is_at(self._at, self._folder)

    def _has_come(self) -> bool:
        return self._waits is None or not self._waits.is_alive()

    def __exit__(self, *_: object) -> None:
        # Still locked: whoever opens the file before it is gone looks whether it still is the folder's.
        if self._waits is not None and self._until is not None:
            self._waits.join(max(0.0, self._until - time.monotonic()))
        with suppress(OSError):  # A file that nobody has locked says nothing.
            if self._has_come() and is_at(self._path, self._file):
                self._path.unlink(missing_ok=True)
        _locks.discard(self._file)
        # A forked process may have the file open too.
        if self.problem is None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        os.close(self._folder)

    def _take(self) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                if self._lock(file) and is_at(self._path, file):
                    os.ftruncate(file, 0)
                    os.pwrite(file, to_json(FolderOwner(os.getpid(), socket.gethostname())).encode(), 0)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            time.sleep(_PROBE_S)

    def _lock(self, file: int) -> bool:
        """Lock the file; returns False if somebody has just looked whether it is locked."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._until is not None:
                self._waits = threading.Thread(target=fcntl.flock, args=(file, fcntl.LOCK_EX), daemon=True)
                self._waits.start()
                return True
            _refuse_held(file, self._path.parent)
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            self.problem = error.strerror
        return True


_PROBE_S: Final = 0.002
_locks: set[int] = set()
"""The files of the locks of this process."""


def _leave_locks_to_parent() -> None:
    # A lock belongs to all who have the file open as this process has.
    for file in _locks:
        os.close(file)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def refuse_locked(folder: Path) -> None:
    """Raise BadRunFolder if a job writes the folder; nothing is changed."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        _refuse_held(file, folder)
    finally:
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Tell whether a job writes the folder."""
    try:
        refuse_locked(folder)
    except BadRunFolder:
        return True
    return False


def _refuse_held(file: int, folder: Path) -> None:
    """Raise BadRunFolder if a job has locked the file."""
    try:
        # What others who only look have, too.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            owner = parse_record(os.pread(file, _OWNER_BYTES, 0), FolderOwner)
            who = f"process {owner.process} on host {owner.host}"
        except ValueError:
            who = "another job"  # which is about to write who it is
        raise BadRunFolder(
            f"run folder {folder} is being written by {who}; wait until that has ended, or name another "
            "folder with --out"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise


_OWNER_BYTES: Final = 4096
