"""The end of all processes of a job: they carry its mark in an environment variable, which is inherited.

A guard is a small process beside the supervisor that does so when the supervisor is gone, however it ended:

    supervisor ──pipe──► guard      closed at the end, or by the kernel when the supervisor is killed:
                                    the guard ends all processes that carry the mark, and exits

Run as a program, this file is the guard; it needs the standard library alone, so as to start in no time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

JOB: Final = "TUTTI_JOB"
"""The environment variable that marks all processes of a job."""

_ROUNDS = 5
_POLL_S = 0.02

_LATE_S: Final = 3.0
"""Time of the guard to end beside what the processes of the job may take."""


@contextmanager
def guard(job: str, grace_s: float) -> Iterator[None]:
    """Have a process end those of a job when the context is left, or this process is gone.

    Args:
        job: the mark of the job.
        grace_s: how long the processes may take to exit on SIGTERM, before SIGKILL.
    """
    # Out of the terminal's reach, and holding none of the pipes that somebody may read to their end.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, job, str(grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != JOB},
        start_new_session=True,
    )
    try:
        yield
    finally:
        # It ends when no process of the job is left.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=grace_s + _LATE_S)
        if process.poll() != 0:  # It was stopped, or killed.
            process.kill()
            process.wait()
            end_processes_of(job, grace_s)


def processes_of(job: str) -> list[int]:
    """Return the processes that carry the mark of the job."""
    mark = f"{JOB}={job}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if mark in environment.split(b"\0"):
            found.append(int(folder.name))
    return found


def end_processes_of(job: str, grace_s: float) -> None:
    """End every process that carries the mark of the job: SIGTERM, and after a while SIGKILL."""
    left = processes_of(job)
    signal_all(left, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = processes_of(job)
    # Several rounds: a process may have forked after the look at /proc, before it got its signal.
    for _ in range(_ROUNDS):
        if not left:
            return
        signal_all(left, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = processes_of(job)


def signal_all(processes: Iterable[int], signum: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for process in processes:
        try:
            os.kill(process, signum)
        except ProcessLookupError:
            continue


def main() -> None:
    """Be the guard of `sys.argv`: job and grace. The standard input ends when the supervisor does."""
    # systemd and Slurm send them to every process of a job, which may still be saving.
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes_of(sys.argv[1], float(sys.argv[2]))


if __name__ == "__main__":
    main()
