"""A process that does nothing is told from one that works, and from one that waits for another program."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tutti.activity import Idleness

BYSTANDER = """
import threading, time
from tutti.activity import be_bystander

def beat():
    be_bystander()
    while True:
        open("/dev/null", "w").write("still here")
        time.sleep(0.01)

threading.Thread(target=beat, daemon=True).start()
"""
TELL = "print('there', flush=True)"
FOREVER = "\nimport threading; threading.Event().wait()"


@contextmanager
def running(program: str) -> Iterator[int]:
    """A process that has told that it is there."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def looks(process: int, until: Callable[[float], bool]) -> float:
    """Look at a process until its idle time is as wanted; the clock of the looks goes by seconds."""
    idle, found = Idleness(process, 0.0), 0.0
    for now in range(1, 100_000):
        found = idle.look(now)
        if until(found):
            break
    return found


@pytest.mark.parametrize("program", [TELL + FOREVER, f"{BYSTANDER}{TELL}{FOREVER}"])
def test_a_process_that_sleeps_is_idle_whatever_bystanders_do(program: str) -> None:
    with running(program) as process:
        assert looks(process, lambda idle_s: idle_s > 20) > 20


WITH_PARENT = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that works until the process that has started it is gone."""


@pytest.mark.parametrize(
    "work",
    [
        "while True: pass",
        "import time\nwhile True: open('/dev/null', 'w').write('a'); time.sleep(0.001)",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WITH_PARENT!r}])",
    ],
)
def test_a_process_that_works_is_not(work: str) -> None:
    with running(f"{TELL}\n{work}") as process:
        idle, found = Idleness(process, 0.0), list[float]()
        # Ten milliseconds of work are seen, whatever the time between two looks.
        while 0.0 not in found:
            found.append(idle.look(1e-3 * (1 + len(found))))


def test_a_process_that_waits_for_a_lock_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        program = f"import fcntl; file = open({str(path)!r}); {TELL}; fcntl.flock(file, fcntl.LOCK_EX)"
        with running(program) as process:
            assert looks(process, lambda idle_s: idle_s == 0.0) == 0.0
            assert Idleness(process, 0.0).look(1.0) == 0.0
