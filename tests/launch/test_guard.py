"""What is known of processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tutti.launch.guard import ends_with


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
