"""Ranks on cores that other programs use too.

OpenMP's threads spin while they wait for each other, which is fastest on idle cores. On a busy core a
spinning thread uses up its time slice, and the thread it waits for is not scheduled: two threads fall to a
thirtieth of one thread's speed. libgomp spins only for a moment once it manages more threads than the host
has cores (`do_spin` in libgomp/config/linux/wait.h). So a rank on busy cores parks a team of idle threads,
and ends it when its cores are quiet again. No result depends on it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at the threads' times, which take a few hundred microseconds."""

BUSY: Final = 0.2
"""The share of their runnable time that threads wait for a core, above which the cores count as busy."""

QUIET: Final = 0.05
"""The share below which they count as quiet again."""


class ThreadTimes(NamedTuple):
    """Seconds that a process's threads have spent on a core, and runnable without one."""

    ran: float
    waited: float

    def waiting_since(self, before: ThreadTimes) -> float:
        """Return the share of the runnable time since then in which threads waited for a core."""
        waited = self.waited - before.waited
        return waited / max(waited + self.ran - before.ran, 1e-9)


def thread_times() -> ThreadTimes | None:
    """Return the times of this process's threads so far; None if the kernel does not count them."""
    ran = waited = 0
    try:
        for folder in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # this thread has just ended
                times = (folder / "schedstat").read_text().split()
                ran += int(times[0])
                waited += int(times[1])
    except OSError:
        return None
    return ThreadTimes(ran / 1e9, waited / 1e9)


class IdleTeam:
    """A team of OpenMP threads that sleep, one more than the host has cores; it lives until `end`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._park, args=(library,), daemon=True)
        self._thread.start()

    def _park(self, library: ctypes.CDLL) -> None:
        # Its work is a function of libgomp that returns at once. The team lives as long as this thread.
        library.GOMP_parallel(library.omp_get_thread_num, None, (os.cpu_count() or 1) + 1, 0)
        self._over.wait()

    def end(self) -> None:
        """End the threads."""
        self._over.set()
        self._thread.join()


class CoreWatch:
    """Watches in the background, until `end`, whether other programs use the cores of a rank's threads."""

    def __init__(self, threads: int) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="core watch", daemon=True)
        if threads > 1:
            self._thread.start()

    def _watch(self) -> None:
        library, team, before = _libgomp(), None, thread_times()
        while library is not None and before is not None and not self._over.wait(LOOK_EVERY_S):
            now = thread_times() or before
            share, before = now.waiting_since(before), now
            if team is None and share > BUSY:
                team = IdleTeam(library)
            elif team is not None and share < QUIET:
                team.end()
                team = None
        if team is not None:
            team.end()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()


def _libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that this process has loaded; None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libgomp" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None
