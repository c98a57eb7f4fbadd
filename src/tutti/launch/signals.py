"""Signals that wake a `select`: SIGCHLD, and the ones that end a program, while there are ranks to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals by which a user, a system, a terminal or a scheduler ends a program."""


def can_be_taken(signum: int) -> bool:
    """Return whether we may handle a signal: not an ignored one, nor SIGUSR1 if the program does."""
    handler = signal.getsignal(signum)
    return handler == signal.SIG_DFL if signum == signal.SIGUSR1 else handler not in (signal.SIG_IGN, None)


class SignalWatch:
    """Notes signals instead of dying from them, and wakes a select on `fileno()`.

    Only the main thread can receive signals in Python: elsewhere this does nothing.
    """

    def __init__(self, signals: Iterable[int] = ENDING) -> None:
        self.waiting: list[int] = []  # the unacknowledged ones, each once
        self.newest_s = 0.0  # of the newest one, by the monotonic clock
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                if can_be_taken(signum):
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._reading)
        os.close(self._writing)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        # A handler that raises nothing lets Python resume `select` (PEP 475): the byte is what ends it.
        if signum not in self.waiting:
            self.newest_s = time.monotonic()
            self.waiting.append(signum)
            os.write(self._writing, b"!")

    @property
    def received(self) -> int | None:
        """Return the first waiting signal, or None."""
        return self.waiting[0] if self.waiting else None

    def fileno(self) -> int:
        """Return a descriptor that is readable once a signal has come."""
        return self._reading

    def acknowledge(self) -> None:
        """Forget the first signal; the others, and later ones, wake a select again."""
        if self.waiting:
            os.read(self._reading, 1)
            # Last, so that no signal is noted without a byte. The same signal needs none meanwhile: the
            # caller looks afterwards.
            self.waiting.pop(0)


def act_on(signum: int) -> None:
    """Call a signal's earlier handler, once the ranks are gone; then exit with 128 + its number."""
    handler = signal.getsignal(signum)
    if callable(handler):
        handler(signum, None)
    raise SystemExit(128 + signum)


@contextmanager
def held_back(*signals: int) -> Iterator[None]:
    """Block signals in this thread, and in processes that it starts until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
