"""Requests from outside to save and stop: SIGTERM, SIGUSR1 or the first Ctrl-C. Needs no torch.

A rank looks for one between two steps, inside of a section that it has declared `stoppable`. Outside of it
the first signal ends everything, instead of waiting for data to be loaded.

    supervisor ──"save and stop"──► page ──► ranks        over hosts each process has its own page, and
               ◄───"stoppable"───── page ◄── rank 0       the connections of the ranks carry both

Ranks that tutti has not started itself (under a user's mpirun, under srun, or alone in this process) get the
signals themselves. So may all others: systemd and Slurm send SIGTERM to every process of a job.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

from tutti.comm.shm import memfd
from tutti.errors import PeerLost
from tutti.launch.launcher import started_by
from tutti.launch.signals import SignalWatch, act_on, can_be_taken

ASKING: Final[tuple[int, ...]] = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask for it. SIGUSR1 does nothing else; the others end everything when they come again."""

SAME_S: Final = 0.5
"""The time in which signals are one request: `timeout` and schedulers signal a process, then its group."""

_BYTES: Final = 2
_REQUEST: Final = 0
_SECTION: Final = 1


class StopPage:
    """Two bytes about the stop of a job, shared by the supervisor and the ranks of its host."""

    def __init__(self, file: int | None = None) -> None:
        self.on_request: Callable[[], None] = lambda: None  # called when the ranks are asked to stop
        self.on_stoppable: Callable[[bool], None] = lambda _: None  # called when `stoppable` is set
        self._bytes = bytearray(_BYTES) if file is None else mmap.mmap(file, _BYTES)

    @staticmethod
    def make_file() -> int:
        """Return the descriptor of new memory to share."""
        file = memfd.make("stop")
        os.ftruncate(file, _BYTES)
        return file

    @property
    def requested(self) -> bool:
        """True if the ranks have been asked to save and stop."""
        return self._bytes[_REQUEST] != 0

    @property
    def stoppable(self) -> bool:
        """True while rank 0 looks for requests."""
        return self._bytes[_SECTION] != 0

    @stoppable.setter
    def stoppable(self, value: bool) -> None:
        self._bytes[_SECTION] = value
        self.on_stoppable(value)

    def request(self) -> None:
        """Ask the ranks to save and stop."""
        self._bytes[_REQUEST] = 1
        self.on_request()

    def withdraw(self) -> None:
        """Forget the request, of a section that is over."""
        self._bytes[_REQUEST] = 0


def say(text: str) -> None:
    """Write a line to standard error, also in the handler of a signal, which may interrupt a print."""
    with suppress(OSError):
        os.write(2, f"tutti: {text}\n".encode())


def _promise(signum: int) -> str:
    again = {signal.SIGINT: "; Ctrl-C again ends at once", signal.SIGTERM: "; a second SIGTERM ends at once"}
    return f"saving, then stopping{again.get(signal.Signals(signum), '')}"


class StopRequests:
    """The supervisor's side: decides for each signal whether it is a request or the end."""

    def __init__(self, signals: SignalWatch, page: StopPage | None = None) -> None:
        self._signals, self.page = signals, page or StopPage()
        self._asked_by: int | None = None
        self._insisted_s = math.inf
        self.ended_by: int | None = None  # the signal that ends everything

    def pass_to(self, page: StopPage) -> None:
        """Send requests, also an earlier one, to other ranks, which replace the previous ones."""
        page.stoppable = page.stoppable or self.page.stoppable
        self.page = page
        if self._asked_by is not None:
            page.request()

    def fileno(self) -> int:
        """Return a descriptor that is readable once a signal has come."""
        return self._signals.fileno()

    def over(self) -> bool:
        """Act on a signal that has come; return whether to end everything now."""
        signum = self._signals.received
        if signum is None:
            return False
        asked_again = signum == signal.SIGUSR1 and self._asked_by is not None
        if asked_again or (signum in ASKING and self._is_repeat):
            self._signals.acknowledge()
            return False
        if signum not in ASKING or self._insisted_s < math.inf or not self.page.stoppable:
            self.ended_by = signum
            return True
        if signum != signal.SIGUSR1:
            self._insisted_s = self._signals.newest_s
        if self._asked_by is None:
            self._asked_by = signum
            say(_promise(signum))
        self.page.request()
        self._signals.acknowledge()
        return False

    def act(self) -> None:
        """Do what the signals mean, once the ranks are gone, as `act_on` does; nothing for mere requests."""
        # A request that comes now has no rank to be passed on to.
        harmless = ASKING if self._is_repeat else (signal.SIGUSR1,)
        late = [signum for signum in self._signals.waiting if signum not in harmless]
        signum = self.ended_by or next(iter(late), None)
        if signum is not None:
            act_on(signum)

    @property
    def _is_repeat(self) -> bool:
        return 0 <= self._signals.newest_s - self._insisted_s < SAME_S


_page = StopPage()
_supervised = False
_early = False
_insisted_s = math.inf
_before: dict[int, Any] = {}


def stop_requested() -> bool:
    """Return whether this rank is to save and stop; other ranks may see this at another step."""
    return _page.requested


def be_supervised(page: StopPage) -> None:
    """In a rank that tutti has started, leave ending signals to the supervisor."""
    global _page, _supervised
    _page, _supervised = page, True
    signal.signal(signal.SIGUSR1, _note)


def note_early() -> None:
    """In a rank of the user's launcher, note SIGUSR1 for the first section, which is still to come."""
    global _early
    if can_be_taken(signal.SIGUSR1) and threading.current_thread() is threading.main_thread():
        _early = True
        signal.signal(signal.SIGUSR1, _note)


def is_supervised() -> bool:
    """Return whether tutti has started this process as a rank, itself or by mpirun."""
    return _supervised


@contextmanager
def stoppable(*, goes_on: bool = False) -> Iterator[None]:
    """Look for requests to stop inside the block: SIGTERM, SIGUSR1 and the first Ctrl-C do not end it.

    All ranks of the job enter and leave it together, and save inside it. Each block begins without a request.
    Only the main thread can receive signals in Python: elsewhere `stop_requested` returns the supervisor's
    requests. If the job `goes_on` after a loss, a request is passed to the next ranks.
    """
    global _early, _insisted_s
    lost = False
    leads = not _supervised or started_by().rank == 0
    if not (_supervised or _early):
        _page.withdraw()
    _early = False
    _insisted_s = math.inf
    try:
        # Virtual ranks share the process, and its handlers.
        if not _before and threading.current_thread() is threading.main_thread():
            for signum in filter(can_be_taken, ASKING):
                _before[signum] = signal.signal(signum, _note)
        if leads:
            _page.stoppable = True
        yield
    except PeerLost:
        lost = True
        raise
    finally:
        # No signal is to end this process while its handlers change.
        _insisted_s = math.inf
        if leads and not (lost and goes_on):
            _page.stoppable = False
        for signum, handler in _before.items():
            # mpirun and srun send it to all ranks, some of them a little later.
            if signum != signal.SIGUSR1 or not started_by().given:
                signal.signal(signum, handler)
        _before.clear()


def _note(signum: int, frame: FrameType | None) -> None:
    """Note a request; a signal that ends this process goes to its earlier handler."""
    global _insisted_s
    now = time.monotonic()
    ends = not _supervised and now - _insisted_s >= SAME_S
    if ends and signum != signal.SIGUSR1:
        signal.signal(signum, _before.get(signum, signal.SIG_DFL))
        signal.raise_signal(signum)
        return
    if _page.stoppable and not (_supervised or _page.requested) and started_by().rank == 0:
        say(_promise(signum))
    if signum != signal.SIGUSR1:
        _insisted_s = min(_insisted_s, now)
    _page.request()
