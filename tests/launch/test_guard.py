"""The guard of a job, and what is known of processes that end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.launch import guard
from tutti.launch.guard import JOB, ends_with, is_being_killed, processes_of


@pytest.mark.parametrize(
    ("program", "signalled", "known"),
    [
        ("import sys; sys.exit(3)", None, 3),
        ("import os; os.abort()", None, -signal.SIGABRT),
        ("input()", signal.SIGKILL, -signal.SIGKILL),
        # It may have been kept from those who ask, which looks the same.
        ("pass", None, None),
    ],
)
def test_the_exit_code_of_a_process_is_known_before_anybody_has_waited_for_it(
    program: str, signalled: signal.Signals | None, known: int | None
) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        if signalled is not None:
            assert ends_with(process.pid) is None
            process.send_signal(signalled)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ends_with(process.pid) == known
        process.wait()
        assert ends_with(process.pid) is None


def test_nothing_is_known_of_a_process_where_no_more_files_can_be_opened() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, hard))
        try:
            assert ends_with(os.getpid()) is None
            assert not is_being_killed(os.getpid())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
