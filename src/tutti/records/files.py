"""Files that are whole or not there, and errors of the system with a remedy. Needs neither torch nor MPI."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder, DiskFull, room_left
from tutti.records.checkpoints import flush_folder


def replace_file(path: Path, content: bytes, flush: bool = True) -> None:
    """Make `content` the content of `path`: all of it or nothing, even after a power cut if it is flushed."""
    with _written_beside(path, content, flush) as file:
        os.replace(file, path)
    if flush:
        flush_folder(path.parent)


def make_file(path: Path, content: bytes) -> bool:
    """Write a new file; return False, unchanged, if there is one already.

    Of several processes that do so at once, one succeeds.
    """
    with _written_beside(path, content) as file:
        try:
            os.link(file, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            # A file system without links: there the last one wins.
            os.replace(file, path)
    flush_folder(path.parent)
    return True


@contextmanager
def _written_beside(path: Path, content: bytes, flush: bool = True) -> Iterator[Path]:
    """Write a file that no other process writes, and remove it if it is still there afterwards."""
    temporary = path.with_name(f"{unfinished_file(path).name}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


WITHOUT_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of a file system that has no locks."""


def unfinished_file(path: Path) -> Path:
    """Return the path of a file before it is complete."""
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Let one process at a time in, on all hosts that share the file system; the others wait.

    The kernel lets the next one in when a process ends in any way. BadRunFolder: the file cannot be made, or
    the file system has no locks.
    """
    with refusing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with refusing(path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn a system error about `path` into one with a remedy."""
    try:
        yield
    except OSError as error:
        kind: type[BadRunFolder] = BadRunFolder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = DiskFull
            left = room_left(path)
            remedy = f"free some space on that disk, {left}, or name a folder on another one with --out"
        elif error.errno == errno.EFBIG:
            kind = DiskFull
            remedy = "raise the limit on the size of files (ulimit -f)"
        else:
            remedy = "name another folder, which you may write, with --out"
        raise kind(f"cannot write {path}: {error.strerror}; {remedy}") from error


def cache_folder() -> Path:
    """Return the folder of replaceable files: `TUTTI_CACHE`, or `tutti` in the user's cache folder."""
    own = os.environ.get("TUTTI_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tutti"
