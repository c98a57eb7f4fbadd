"""Locks that ranks hold while they live: the kernel frees one as soon as its owner begins to end.

    rank        ─── holds ─────────────── ✝ killed ── its memory is given back (tens of ms) ─ parent told
    supervisor        waits for the lock ─ has it: knows

They are robust mutexes (POSIX, pthread_mutexattr_setrobust) in the memory that both share.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tutti.comm.shm.arena import Arena

BYTES: Final = 64
"""The room of a lock: that of a mutex on any processor, and a word."""

_HELD: Final = BYTES // 8 - 1
"""The word that is 1 once the owner has the lock."""

_ROBUST, _SHARED = 1, 1
_libc = ctypes.CDLL(None)

_held: list[LifeLock] = []


class LifeLock:
    """The lock of one rank.

    Args:
        arena: has it.
        offset: where in it `make` has made it, of `BYTES` zero bytes.
    """

    def __init__(self, arena: Arena, offset: int) -> None:
        self._words = arena.words(offset, BYTES // 8)
        self._mutex = ctypes.c_char.from_buffer(self._words)

    @classmethod
    def make(cls, arena: Arena, offset: int) -> LifeLock:
        """Make a lock, which nobody has yet."""
        lock, kind = cls(arena, offset), ctypes.create_string_buffer(BYTES)
        _check(_libc.pthread_mutexattr_init(kind))
        _check(_libc.pthread_mutexattr_setrobust(kind, _ROBUST))
        _check(_libc.pthread_mutexattr_setpshared(kind, _SHARED))
        _check(_libc.pthread_mutex_init(ctypes.byref(lock._mutex), kind))
        return lock

    def hold(self) -> None:
        """Take the lock, for as long as the calling thread lives."""
        _held.append(self)  # The kernel looks for it in this process's memory.
        _check(_libc.pthread_mutex_lock(ctypes.byref(self._mutex)))
        self._words[_HELD] = 1

    @property
    def is_held(self) -> bool:
        """Whether its owner has taken it; that may have ended since."""
        return bool(self._words[_HELD])

    def wait(self) -> None:
        """Wait until the thread that has taken it ends."""
        code = _libc.pthread_mutex_lock(ctypes.byref(self._mutex))
        if code == errno.EOWNERDEAD:
            code = _libc.pthread_mutex_consistent(ctypes.byref(self._mutex))
        _check(code)
        _check(_libc.pthread_mutex_unlock(ctypes.byref(self._mutex)))


class LifeWatch:
    """Waits for the ends of ranks.

    Args:
        locks: that they hold.
    """

    def __init__(self, locks: Sequence[LifeLock]) -> None:
        self._untaken = list(locks)
        self._ends = _Ends()

    def fileno(self) -> int:
        """The descriptor that is ready once a rank has begun to end."""
        return self._ends.descriptor

    @property
    def waits_for_all(self) -> bool:
        """Whether each rank has taken its lock, and is waited for."""
        return not self._untaken

    def look(self) -> None:
        """Wait, from now on, for the ends of those ranks that have taken their lock by now.

        Where there are no threads left nobody waits: their parent tells of them, if later.
        """
        taken = [lock for lock in self._untaken if lock.is_held]
        self._untaken = [lock for lock in self._untaken if lock not in taken]
        for lock in taken:
            with suppress(RuntimeError):
                threading.Thread(target=_tell, args=(lock, self._ends), daemon=True).start()

    def clear(self) -> None:
        """Take note of the ends so far."""
        os.eventfd_read(self._ends.descriptor)

    def close(self) -> None:
        """Watch no longer."""
        self._ends.close()


class _Ends:
    """What the threads tell of an end by. They may outlive the watch, as a process may be slow to end."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changing = threading.Lock()

    def tell(self) -> None:
        with self._changing:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        with self._changing:
            os.close(self.descriptor)
            self.descriptor = -1


def _tell(lock: LifeLock, ends: _Ends) -> None:
    lock.wait()
    ends.tell()


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, os.strerror(code))
