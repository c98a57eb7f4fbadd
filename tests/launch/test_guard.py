"""The guard of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.launch import guard
from tutti.launch.guard import JOB, processes_of


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL, None])
def test_the_processes_of_a_job_are_ended_even_if_its_guard_is_stopped_or_gone(
    sent: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_LATE_S", 0.5)
    job = f"guarded-{os.getpid()}"
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with guard.guard(job, 0.2):
        (own,) = set(children.read_text().split()) - before
        if sent is not None:
            os.kill(int(own), sent)
        program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]
        member = subprocess.Popen(program, env={**os.environ, JOB: job}, stdout=subprocess.PIPE)
        assert member.stdout is not None
        member.stdout.readline()
        assert processes_of(job) == [member.pid]
    assert not Path(f"/proc/{own}").exists()
    assert processes_of(job) == []
    assert member.wait() == -signal.SIGTERM
    member.stdout.close()
