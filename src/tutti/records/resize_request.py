"""A request that a run go on with another number of workers: a file in its folder. Needs no torch.

    whoever asks          writes the file, and locks it ── waits ──────────────── reads the answer, removes it
    process of the run              finds the file ── prepares new ranks ── answers in its place

The kernel takes the lock off when whoever asks has ended: then nobody waits, and the file says nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.files import refusing, replace_shared_file
from tutti.records.json_lines import Record, parse_record, to_json

REQUEST: Final = "resize.json"

_BYTES: Final = 65536
_WITHOUT_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class ResizeRequest(Record):
    """The content of the file.

    Attributes:
        workers: that are to train.
        answer: what the run says to that; None: nothing yet.
        agreed: they do.
    """

    workers: int
    answer: str | None = None
    agreed: bool = False


class Asking:
    """A request, which stands until this is closed.

    Args:
        folder: of the run.
        workers: that are to train.

    Raises:
        BadRunFolder: somebody else asks for others now; or the file cannot be written, or locked.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self._path = folder / REQUEST
        with refusing(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            with refusing(self._path):
                self._lock(folder)
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, to_json(ResizeRequest(workers)).encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadRunFolder(
                f"{folder} is being asked for another number of workers already; wait for the answer to that"
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            raise BadRunFolder(
                f"the file system of {folder} has no locks ({error.strerror}), so the run cannot be asked; "
                "stop it and go on with --resume and another -n"
            ) from error

    def answer(self) -> ResizeRequest | None:
        """The request with the answer to it; None: there is none yet."""
        with suppress(OSError, ValueError):
            found = parse_record(self._path.read_bytes(), ResizeRequest)
            return None if found.answer is None else found
        return None

    def close(self) -> None:
        """Take it back, answered or not."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def requested(folder: Path) -> int | None:
    """Return the number of workers that somebody asks a run for, and waits for; None: nobody does.

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
        with suppress(OSError, ValueError):  # It is being written.
            return parse_record(os.pread(file, _BYTES, 0), ResizeRequest).workers
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    finally:
        os.close(file)
    return None


def answer(folder: Path, workers: int, text: str, *, agreed: bool) -> None:
    """Answer the request for so many workers.

    Raises:
        OSError: the answer cannot be written.
    """
    replace_shared_file(folder / REQUEST, to_json(ResizeRequest(workers, text, agreed)).encode())
