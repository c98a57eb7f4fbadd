"""What the launch tests need to know about processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

PATIENCE_S = 30.0


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has asked for yet, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: Iterable[int], patience_s: float = PATIENCE_S) -> list[int]:
    """The processes that still run when all have ended or the patience is over."""
    deadline = time.monotonic() + patience_s
    left = [pid for pid in pids if lives(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if lives(pid)]
    return left


def wait_for_files(paths: Iterable[Path], patience_s: float = 2 * PATIENCE_S) -> None:
    """Return when all the files are there, with something in them."""
    deadline = time.monotonic() + patience_s
    missing = list(paths)
    while missing:
        assert time.monotonic() < deadline, f"missing after {patience_s} s: {missing}"
        time.sleep(0.02)
        missing = [path for path in missing if not (path.exists() and path.stat().st_size)]


def shared_memory_files() -> set[str]:
    """What lies in /dev/shm, but for what MPI programs and process pools that run meanwhile put there."""
    others = ("sm_segment", "tutti-mpi-", "sem.mp-", "sem.loky-")
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(others)}


def left_in_shared_memory(before: set[str], patience_s: float = PATIENCE_S) -> set[str]:
    """The files that are in /dev/shm since then; those of tests that run meanwhile go away again."""
    deadline = time.monotonic() + patience_s
    left = shared_memory_files() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= shared_memory_files()
    return left
