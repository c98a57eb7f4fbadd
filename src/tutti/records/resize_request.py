"""A request that a run go on with another number of workers: a file in its folder. Needs no torch.

    whoever asks          writes the file, and locks it ── waits ──────────────── reads the answer, removes it
    process of the run    locks the folder ── finds the file ── prepares new ranks ── answers in the same file

The kernel takes a lock off when its owner has ended: then nobody waits, and the file says nothing, or nobody
answers. Each
request is a new file with a token of its own, so that nobody gets the answer to another one. It has room for
the answer from the beginning, which a disk that is full by then cannot refuse.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.files import WITHOUT_LOCKS, is_at
from tutti.records.json_lines import Record, parse_record, to_json

REQUEST: Final = "resize.json"

_BYTES: Final = 65536
_ROOM: Final = 4096
"""The size of the file, in bytes, which a longer answer exceeds."""

GONE_S: Final = 10.0
"""The longest time in which somebody who has an answer reads it, or was killed and is not gone yet."""

_PROBE_S: Final = 0.002
_PROBES: Final = 50


@dataclass(frozen=True)
class ResizeRequest(Record):
    """The content of the file.

    Attributes:
        workers: that are to train.
        token: what no other request has.
        answer: what the run says to that; None: nothing yet.
        agreed: they do.
        warnings: sentences that whoever asks should read, if they do.
    """

    workers: int
    token: str
    answer: str | None = None
    agreed: bool = False
    warnings: tuple[str, ...] = ()

    def as_bytes(self) -> bytes:
        """What the file holds."""
        return to_json(self).encode().ljust(_ROOM)


class Answerer:
    """The sign that somebody answers requests to a run, until this is closed.

    Args:
        folder: of the run.

    Raises:
        OSError: too many files are open.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for _ in range(_PROBES):
            try:
                fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # Somebody has just looked.
                time.sleep(_PROBE_S)
            except OSError:
                return  # Of a file system without locks.
            else:
                return

    def close(self) -> None:
        """Take it away."""
        os.close(self._folder)


def somebody_answers(folder: Path) -> bool | None:
    """Tell whether there is an `Answerer` for the folder of a run; None: that cannot be told there."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


class Asking:
    """A request, which stands until this is closed.

    Args:
        folder: of the run.
        workers: that are to train.
        patience_s: how long to wait for somebody else who asks and has no answer.

    Raises:
        BadRunFolder: somebody else asks for others now; or the file cannot be written, or locked.
    """

    def __init__(self, folder: Path, workers: int, patience_s: float = 0.0) -> None:
        now = time.monotonic()
        self._until, self._until_read = now + patience_s, now + max(patience_s, GONE_S)
        self._path = folder / REQUEST
        self._request = ResizeRequest(workers, secrets.token_hex(8))
        _refuse_other_kinds(self._path)
        try:
            self._file = self._take(folder)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space on that disk" if full else "ask as the user who has started the run"
            raise BadRunFolder(
                f"cannot write {self._path}, by which a run is asked: {error.strerror}; {remedy}"
            ) from error

    def _take(self, folder: Path) -> int:
        """Make the file, lock it, and write the request into it."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                if self._lock(file, folder) and is_at(self._path, file):
                    if os.fstat(file).st_size == 0:
                        self._write(file, folder)
                        return file
                    # Of somebody who was killed; the run may be answering that.
                    self._path.unlink()
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            time.sleep(_PROBE_S)

    def _write(self, file: int, folder: Path) -> None:
        try:
            # Root may ask somebody's run, which is to answer.
            with suppress(OSError):
                os.fchown(file, folder.stat().st_uid, -1)
            os.pwrite(file, self._request.as_bytes(), 0)
        except BaseException:
            self._path.unlink()
            raise

    def _lock(self, file: int, folder: Path) -> bool:
        """Lock the file; returns False if that may be possible in a moment."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with suppress(BlockingIOError):
                # What others who only look have, too.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            found = _read(file)
            answered = found is not None and found.answer is not None
            if time.monotonic() < (self._until_read if answered else self._until):
                return False
            raise BadRunFolder(
                f"{folder} is being asked for another number of workers already; wait for the answer to that"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            raise BadRunFolder(
                f"the file system of {folder} has no locks ({error.strerror}), so the run cannot be asked; "
                "stop it and go on with --resume and another -n"
            ) from error
        return True

    def answer(self) -> ResizeRequest | None:
        """The request with the answer to it; None: there is none yet.

        Raises:
            BadRunFolder: the file was removed.
        """
        # Before it is read: a run that cannot write into it removes it.
        there = is_at(self._path, self._file)
        found = _read(self._file)
        if found is not None and found.answer is not None:
            return found
        if not there:
            raise BadRunFolder(
                f"{self._path} was removed before there was an answer in it; see what the run has printed"
            )
        return None

    def close(self) -> None:
        """Take it back, answered or not."""
        with suppress(OSError):
            if is_at(self._path, self._file):
                self._path.unlink()
        os.close(self._file)


def requested(folder: Path) -> ResizeRequest | None:
    """Return what somebody asks a run for, and waits for an answer to; None: nobody does.

    Args:
        folder: of the run.
    """
    try:
        file = os.open(folder / REQUEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        found = _read(file)
        return found if found is not None and found.answer is None else None
    except OSError:
        pass  # Of a file system without locks, or whose server is gone.
    finally:
        os.close(file)
    return None


def answer(
    folder: Path, request: ResizeRequest, text: str, *, agreed: bool, warnings: tuple[str, ...] = ()
) -> None:
    """Answer a request; whoever has taken it back is told nothing.

    Raises:
        OSError: the answer cannot be written. The file is removed, so that nobody waits.
    """
    path = folder / REQUEST
    said = replace(request, answer=text, agreed=agreed, warnings=warnings)
    with suppress(FileNotFoundError):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = _read(file)
                if found is not None and found.token == request.token:
                    os.pwrite(file, said.as_bytes(), 0)
            finally:
                os.close(file)
        except OSError:
            path.unlink()
            raise


def remove_forgotten(folder: Path) -> None:
    """Remove the request of somebody who was killed, if there is one.

    Args:
        folder: of the run.
    """
    path = folder / REQUEST
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG(os.fstat(file).st_mode) and is_at(path, file):
                path.unlink()
        finally:
            os.close(file)


def _read(file: int) -> ResizeRequest | None:
    """Read an open file; None: it is being written, or cannot be read."""
    try:
        return parse_record(os.pread(file, _BYTES, 0), ResizeRequest)
    except (OSError, ValueError):
        return None


def _refuse_other_kinds(path: Path) -> None:
    """Raise BadRunFolder if something is in the place of the file that is none."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BadRunFolder(f"{path} is no file, but a link, a folder or a pipe; remove it and ask again")
