"""The errors that tutti raises on purpose, and its exit codes.

    exit code
    0      done
    1      a rank failed, or the verdict is no: runs differ, a trial failed, a machine is not ready
    2      the input is wrong; the message says what to change
    75     a run was asked to stop, and has saved its state: run it again
    129    ended at once by SIGHUP
    130    ended at once by Ctrl-C
    141    the reader of the output has gone, as after `tutti ... | head`
    143    ended at once by SIGTERM

The most frequent errors, and their exit codes:

    TuttiError                    1
    ├── UserError                     2      the input is wrong
    │   ├── UnknownName                      a name that is not in a table; names the nearest one
    │   ├── BadOption                        an option whose value cannot be used
    │   ├── BadData                          a data set that is missing, broken or does not fit
    │   ├── BadModel                         a model that cannot be built or does not fit the data
    │   ├── BadRunFolder                     a run folder that cannot be read or written
    │   │   └── DiskFull                     the disk has no room for it
    │   └── NotFinite                        NaN or inf turned up in the data, the loss or the weights
    ├── PeerLost                      1      another rank died or gave up
    │   ├── HostLost                         all ranks of a host, with the host
    │   └── LauncherLost                     all ranks, with the mpirun that had started them
    ├── OutputClosed                  141    the reader of standard output has gone
    └── RankFailed                    1      a rank raised an exception: its traceback is in the message

Every message says what was found, what was expected, and what to do next.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from types import UnionType
from typing import Final, Self

from typing_extensions import override

_MOST_LISTED: Final = 24
"""Limit on the known names that an `UnknownName` lists."""

EXIT_INTERRUPTED: Final = 75
"""The exit code of a run that has saved its state and stopped before its end: run it again. (EX_TEMPFAIL)"""


class TuttiError(Exception):
    """Base of all errors of tutti. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UserError(TuttiError):
    """The input is wrong. The command line prints only the message, without a traceback."""

    exit_code = 2


class OutputClosed(TuttiError):
    """The reader of standard output has gone, as after `tutti ... | head`: not an error, but the end."""

    exit_code = 141
    """The exit code that a shell gives a program that ended by SIGPIPE."""


class BadOption(UserError):
    """An option whose value cannot be used."""


class BadData(UserError):
    """A data set that is missing, broken, or does not fit the rest."""


class BadModel(UserError):
    """A model that cannot be built, or does not fit the data or the loss."""


class BadRunFolder(UserError):
    """A run folder that cannot be read or written."""


class DiskFull(BadRunFolder):
    """A run folder whose disk has no room for what is to be written."""


class RunStopped(TuttiError):
    """A run that was stopped before its end, with its state saved."""


class StateLost(UserError):
    """A run that was stopped, and whose state could not be saved."""

    exit_code = 1


class BadCheckpoint(UserError):
    """A checkpoint that cannot be read, is damaged, or is of another model or run."""


class NotFinite(UserError):
    """NaN or inf turned up where only finite numbers can be used."""


class UnknownName(UserError):
    """A name that is not in a table of tutti.

    Args:
        kind: what the name stands for, in the singular ("model", "option").
        name: the given name.
        known: the names that exist; the nearest one is proposed, and all are listed if they are few.
        hint: another way to give this thing, as a sentence, or nothing.
        of: what has or takes things of this kind ("model 'mlp'", "--validate"), or nothing.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "", of: str = "") -> None:
        self.kind, self.name, self.known, self.hint, self.of = kind, name, sorted(known), hint, of
        # Options may be spelled differently in texts.
        super().__init__(kind, name, hint, of, *self.known)

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str], str, str]]:
        kind, name, hint, of, *known = self.args
        return type(self), (kind, name, known, hint, of)

    @override
    def __str__(self) -> str:
        kind, name, hint, of, *known = self.args
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"; did you mean '{near[0]}'?" if near else "."
        listed = f"Known: {', '.join(known)}." if known else "It has none." if of else ""
        if len(known) > _MOST_LISTED:
            nearest = difflib.get_close_matches(name, known, n=3, cutoff=0)
            listed = f"The nearest of {len(known)}: {', '.join(nearest)}."
        return " ".join(filter(None, (f"unknown {kind} '{name}'{of and ' of ' + of}{meant}", listed, hint)))


class PeerLost(TuttiError, RuntimeError):
    """Another rank of this communicator died or gave up.

    Args:
        ranks: the lost ranks, numbered in the job; none if unknown, and `why` says all.
        why: what is known about it ("killed by signal 9"), or nothing.
    """

    def __init__(self, ranks: Iterable[int], why: str = "") -> None:
        super().__init__(sorted(ranks), why)
        self.ranks, self.why = self.args

    @override
    def __str__(self) -> str:
        why = str(self.args[-1])
        who = f"lost rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{who}{why and ': ' + why}" if self.ranks else why

    def adding(self, more: str) -> Self:
        """Return the same loss with a longer reason."""
        again = copy(self)
        again.why = f"{self.why}; {more}"
        again.args = (*self.args[:-1], again.why)
        return again


class RankHung(PeerLost):
    """Ranks that made no step for too long, and were ended."""


class HostLost(PeerLost):
    """A host is gone, or cannot be reached any more, with the ranks that ran there."""

    def __init__(self, hosts: Iterable[str], ranks: Iterable[int], why: str) -> None:
        super().__init__(ranks, why)
        self.hosts = list(hosts)
        self.args = self.hosts, self.ranks, why

    @override
    def __str__(self) -> str:
        return f"lost host{'s' if len(self.hosts) > 1 else ''} {', '.join(self.hosts)}: {self.args[-1]}"


class LauncherLost(PeerLost):
    """The mpirun that had started the ranks is gone, and they with it."""

    def __init__(self, why: str) -> None:
        super().__init__((), why)
        self.args = (why,)


class CallsDiffer(TuttiError, ValueError, RuntimeError):
    """The ranks of a communicator made different calls, or the same with different sizes or dtypes."""


class RankFailed(TuttiError):
    """A rank raised an exception that is not a `UserError`.

    Args:
        rank: the rank, numbered in the job.
        traceback: its formatted traceback.
    """

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(rank, traceback)
        self.rank, self.traceback = rank, traceback

    @override
    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.args[-1].rstrip()}"


def says_all(error: BaseException) -> bool:
    """Return whether the message of an error says enough, so that no traceback is shown."""
    return isinstance(error, UserError | PeerLost | OutputClosed) or type(error) is TuttiError


def in_one_line(message: str) -> str:
    """Return the message of an error in one line: the last of a rank's traceback, with the exception."""
    lines = message.splitlines()
    traceback = len(lines) > 1 and re.fullmatch(r"rank \d+ failed:", lines[0])
    line = lines[-1] if traceback else " ".join(line.strip() for line in lines)
    return line if len(line) <= _MOST_LINE else f"{line[:_MOST_LINE]}..."


_MOST_LINE: Final = 2000


def room_left(path: Path) -> str:
    """Return how much room the disk of a path has, in words, whether or not the path exists."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))
    return f"which has {shutil.disk_usage(existing).free:,} bytes left"


_LIMITS: Final = {
    errno.EMFILE: "too many open files: raise the limit of this process (ulimit -n), or use fewer workers",
    errno.ENFILE: "too many open files: raise the limit of this machine, or use fewer workers",
    errno.EAGAIN: "no further process can be started: raise the limit of this user (ulimit -u, which counts "
    "threads, too) or of the container (pids.max of its control group), or use fewer workers",
}


def with_remedy(error: BaseException) -> UserError | None:
    """Return the error with a remedy if a disk is full or a system limit is reached, else None."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return UserError(_LIMITS[errno.EAGAIN])
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space on that disk, or raise the limit on the size of files (ulimit -f)"
        return UserError(f"cannot write {error.filename or 'a file'}: {error.strerror}; {remedy}")
    return UserError(_LIMITS[error.errno]) if error.errno in _LIMITS else None


def refuse_other(given: object, kind: type | UnionType, what: str, such_as: str) -> None:
    """Raise BadOption for an argument of another type than `kind`; `such_as` is an example."""
    if not isinstance(given, kind):
        raise BadOption(f"the {what} is {given!r:.80}; give an object, such as {such_as}")
