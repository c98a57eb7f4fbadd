"""Finds and ends what the processes of a job have left running: their descendants inherit the job's mark."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

JOB: Final = "TUTTI_JOB"
"""The environment variable that marks all processes of a job, whoever their parent is."""

_ROUNDS = 5


def wait_for_exit(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all of them have ended, or the time is over."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def processes_of(job: str) -> list[int]:
    """The processes, other than this one, that carry the mark of the job."""
    mark = f"{JOB}={job}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
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
    _signal_all(left, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = processes_of(job)
    for _ in range(_ROUNDS):
        if not left:
            return
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
        left = processes_of(job)


def _signal_all(processes: Sequence[int], signum: int) -> None:
    for process in processes:
        try:
            os.kill(process, signum)
        except ProcessLookupError:
            continue
