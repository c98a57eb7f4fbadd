"""Ranks on cores that other programs use too.

OpenMP's threads spin for milliseconds while they wait for each other. On a busy core a spinning thread uses
up its time slice, and the thread that all others wait for is not scheduled: two threads fall to a thirtieth
of one thread's speed. libgomp spins only for a moment once it manages more threads than the host has cores
(`do_spin` in libgomp/config/linux/wait.h). So a rank on busy cores parks a team of idle threads that makes it
so, and ends that team when its cores are quiet again. No result depends on it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tutti.activity import be_bystander
from tutti.terminal import warn_on_stderr

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at the threads' times, which take a few hundred microseconds."""

BUSY: Final = 0.2
"""The share of their runnable time that threads wait for a core, above which the cores count as busy."""

QUIET: Final = 0.05
"""The share below which they count as quiet again."""

STARVED: Final = 0.5
"""The share above which a warning is due, after `WARN_AFTER_S` seconds without a better one."""

WARN_AFTER_S: Final = 30.0


class ThreadTimes(NamedTuple):
    """Seconds that a process's threads have spent on a core, and runnable without one."""

    ran: float
    waited: float


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


def waiting_share(before: ThreadTimes, now: ThreadTimes | None) -> float:
    """Return the share of their runnable time in which threads waited for a core, in [0, 1]."""
    if now is None:
        return 0.0
    waited = now.waited - before.waited
    return waited / max(waited + now.ran - before.ran, 1e-9)


class IdleTeam:
    """A team of OpenMP threads that sleep, one more than the host has cores; it lives until `end`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._park, args=(library,), daemon=True)
        self._thread.start()

    def _park(self, library: ctypes.CDLL) -> None:
        threads = (os.cpu_count() or 1) + 1
        # Its work is a function of libgomp that returns at once. The team lives as long as this thread.
        library.GOMP_parallel(library.omp_get_thread_num, None, threads, 0)
        self._over.wait()

    def end(self) -> None:
        """End the threads."""
        self._over.set()
        self._thread.join()


def libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that this process has loaded; None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libgomp" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None


class CoreWatch:
    """Watches in the background, until `end`, whether other programs use this rank's cores.

    Args:
        threads: the number of threads that the rank computes with.
        warns: whether this rank prints the warning.
    """

    def __init__(self, threads: int, warns: bool) -> None:
        self._threads, self._warns = threads, warns
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="core watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        be_bystander()
        library = libgomp() if self._threads > 1 else None
        team: IdleTeam | None = None
        starved_s = 0.0
        before = thread_times()
        while before is not None and not self._over.wait(LOOK_EVERY_S):
            now = thread_times()
            waiting = waiting_share(before, now)
            before = now
            if team is None and library is not None and waiting > BUSY:
                team = IdleTeam(library)
            elif team is not None and waiting < QUIET:
                team.end()
                team = None
            starved_s = starved_s + LOOK_EVERY_S if waiting > STARVED else 0.0
            if self._warns and starved_s >= WARN_AFTER_S:
                self._warns = False
                warn_on_stderr(starvation(waiting, self._threads))
        if team is not None:
            team.end()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()


def starvation(waiting: float, threads: int) -> str:
    """Return the warning of a rank whose threads wait for a core for the share `waiting` of their time."""
    remedy = "--threads 1 loses less by it" if threads > 1 else "fewer ranks (-n) lose less by it"
    return (
        f"the threads of this run wait for a core {waiting:.0%} of their time, as others use its cores too "
        f"(`top` shows whose); {remedy}"
    )
