"""The report that a rank sends at its end, and the choice of the cause among several failures."""

from __future__ import annotations

import pickle
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tutti.errors import (
    OutputClosed,
    PeerLost,
    RankFailed,
    RankHung,
    TuttiError,
    UserError,
    says_all,
    with_remedy,
)

_RUNPY = "<frozen runpy>"
_NAMES = {int(one): one.name for one in signal.Signals}

_LOST_IN_TORCH = re.compile(
    r"\bPeerLost: lost rank|\bgloo/transport/.*(closed by peer|reset by peer|Broken pipe|Connection refused)"
)
"""The words for a lost peer in errors of torch's C++: it keeps only the text of our callbacks' errors."""


@dataclass(frozen=True)
class Report:
    """A rank's report of its outcome."""

    rank: int
    at: float  # the time, by the host's monotonic clock
    value: bytes | None = None  # rank 0's return value, pickled
    error: bytes | None = None  # the pickled error, if its message suffices without a traceback
    traceback: str = ""  # of an exception
    lost: bool = False  # it failed only because it lost a peer

    @property
    def failed(self) -> bool:
        """True if the rank ended with an exception."""
        return bool(self.traceback)


@dataclass(frozen=True)
class Death:
    """A rank that ended without a report."""

    rank: int
    at: float  # the time at which it was noticed, by the clock of the reports
    returncode: int | None  # the exit code, or minus the number of the signal; None: unknown
    after: bool = False  # it failed after its report: in exit functions, threads, or open files
    hung: str = ""  # the reason, if it was killed because it hung

    def why(self) -> str:
        """Describe the death, such as "killed by signal 9 (SIGKILL)"."""
        if self.hung:
            return self.hung
        if self.returncode is None:
            return "it ended before it was done"
        if self.returncode >= 0:
            when = "after it was done, in what it does at its end" if self.after else "before it was done"
            return f"exited with code {self.returncode} {when}"
        text, number = killed_by(-self.returncode), -self.returncode
        if number == signal.SIGKILL:
            text += (
                "; if no user sent it, the memory may have run out: look for 'oom' in the output of dmesg, "
                "and use fewer workers or a smaller model or batch"
            )
        elif number == signal.SIGBUS:
            text += (
                "; a file that it had mapped into memory was cut off, or its disk failed, or there was no "
                "room for shared memory: leave data files alone while they are read, and look at df /dev/shm"
            )
        return text


def killed_by(number: int) -> str:
    """Describe a death by a signal, such as "killed by signal 9 (SIGKILL)"."""
    return f"killed by signal {number}{' (' + _NAMES[number] + ')' if number in _NAMES else ''}"


def without_launcher(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of the launcher at its beginning."""
    inner = frames
    while inner is not None and _starts(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return inner or frames


def _starts(file: str) -> bool:
    """Return whether a file belongs to this package, or runs a user's program."""
    here, path = Path(__file__).parent, Path(file)
    return path.parent == here or path == here.parent / "run/script.py" or path.name == _RUNPY


def done(rank: int, value: object) -> Report:
    """Return the report of a rank that is done; rank 0's return value is the job's."""
    if rank != 0:
        return Report(rank, time.monotonic())
    import cloudpickle

    return Report(rank, time.monotonic(), cloudpickle.dumps(value))


def failure(rank: int, error: BaseException, frames: TracebackType | None) -> Report:
    """Return the report of an exception, with the traceback of these frames."""
    if isinstance(error, BrokenPipeError) and output_closed():
        error = OutputClosed("the reader of standard output has gone")
    error = with_remedy(error) or error
    text = "".join(traceback.format_exception(type(error), error, frames))
    pickled = _pickled(error) if isinstance(error, TuttiError) and says_all(error) else None
    in_torch = isinstance(error, RuntimeError) and _LOST_IN_TORCH.search(str(error)) is not None
    return Report(rank, time.monotonic(), None, pickled, text, in_torch or isinstance(error, PeerLost))


def output_closed() -> bool:
    """Return whether standard output is a pipe, a socket or a terminal whose other end is gone."""
    poll = select.poll()
    poll.register(sys.__stdout__ or 1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _pickled(error: TuttiError) -> bytes:
    """Return the pickled error, or if its class cannot be sent, its message in a plain `UserError`."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # A class from outside may raise anything: its message is what counts.
        data = pickle.dumps(UserError(str(error)))
    return data


def first_failure(reports: Iterable[Report], deaths: Iterable[Death]) -> tuple[TuttiError | None, bool]:
    """Return the failure that came first, as the error to raise, and whether it is certain.

    A rank that lost a peer is a consequence of the peer's failure: uncertain, until nothing else turns up.
    """
    deaths = list(deaths)
    failed = [report for report in reports if report.failed]
    causes: list[Report | Death] = [*deaths, *(report for report in failed if not report.lost)]
    if not causes:
        lost = min(failed, key=lambda report: report.at, default=None)
        return (None if lost is None else _error(lost)), False
    first = min(causes, key=lambda one: one.at)
    if isinstance(first, Report):
        return _error(first), True
    ranks = [death.rank for death in deaths]
    return (RankHung if first.hung else PeerLost)(ranks, first.why()), True


def _error(report: Report) -> TuttiError:
    if report.error is not None:
        error = pickle.loads(report.error)
        assert isinstance(error, TuttiError)
        return error
    return RankFailed(report.rank, report.traceback)
