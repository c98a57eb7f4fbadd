"""Whether a process does anything: it computes, reads or writes, or something that it has started does.

A process in a deadlock does nothing at all. One that imports, downloads or prepares data computes, moves
bytes, or has a child that does, though it may be slow. One that waits for a lock on a file waits for another
program, of which nothing is known here. An endless loop looks like work, and cannot be told from it.

Threads and processes that look on, such as one that writes a heartbeat once a second, do not count: they have
a name by which they are known. Needs no torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BYSTANDER: Final = "tutti-bystander"
"""The name of threads that do not count, as the kernel has it: 15 characters at most."""

IDLE_SHARE: Final = 1e-3
"""The share of a core that an idle process may use: libraries have threads that look around."""

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PR_SET_NAME: Final = 15


def be_bystander() -> None:
    """Have what this thread does not count as work of its process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, BYSTANDER.encode(), 0, 0, 0)


class Idleness:
    """The time for which a process has been idle.

    Args:
        process: its number.
        now: the time in seconds, of a clock that never goes back.
    """

    def __init__(self, process: int, now: float) -> None:
        self.process, self._since, self._done = process, now, work_of(process)

    def look(self, now: float) -> float:
        """Look at the process; returns for how many seconds it has been idle."""
        done, passed = work_of(self.process), now - self._since
        if done is not None and self._done is not None:
            # The kernel counts in ticks: one more may be the rest of what was done before.
            most_s = _TICK_S + IDLE_SHARE * passed
            if done[0] - self._done[0] <= most_s and done[1] == self._done[1]:
                return passed
        self._since, self._done = now, done
        return 0.0


def work_of(process: int) -> tuple[float, int] | None:
    """The seconds of cores that a process and its descendants have used, and the bytes that they have moved.

    None: it waits for a lock on a file, or the kernel does not tell.
    """
    try:
        family = list(_family(process))
        # Whoever has the lock.
        waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line)
        if {int(fields[5]) for fields in waiting} & set(family):
            return None
        ticks, nbytes = 0, 0
        for one in family:
            # Those of children that have ended.
            ticks += sum(map(int, _fields(Path(f"/proc/{one}/stat"))[13:15]))
            for thread in Path(f"/proc/{one}/task").iterdir():
                if (thread / "comm").read_text().strip() != BYSTANDER:
                    ticks += sum(map(int, _fields(thread / "stat")[11:13]))
                    lines = (thread / "io").read_text().splitlines()
                    nbytes += sum(int(line.partition(": ")[2]) for line in lines)
        return _TICK_S * ticks, nbytes
    except (OSError, ValueError, IndexError):
        return None


def _family(process: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield process
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from _family(int(child))


def _fields(stat: Path) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may have blanks; the first is the state."""
    return stat.read_text().rpartition(")")[2].split()
