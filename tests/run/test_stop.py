"""Runs that a signal asks to stop, from the command line: they save, and say so by their exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch.processes import wait_for_files
from tutti.errors import EXIT_INTERRUPTED
from tutti.records.folder_lock import is_locked
from tutti.records.run_folder import RunFolder

TRAIN = ["train", "mlp", "--epochs", "100000"]


def stopped_by(signum: int, words: list[str], folder: Path, **environment: str) -> str:
    """Ask a run to stop in its second epoch; return what it has said, once it has ended as it should."""
    said = folder.with_suffix(".txt")
    with said.open("w") as file:
        run = subprocess.Popen(
            [*words, "--out", folder],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        wait_for_files([folder / "history.jsonl"])
        os.kill(run.pid, signum)
        if signum == signal.SIGINT:  # As `timeout` sends it: to the command, then to the whole group.
            os.killpg(run.pid, signum)
        assert run.wait(timeout=90) == EXIT_INTERRUPTED, said.read_text()
    finally:
        run.kill()
        run.wait()
    assert (folder / "checkpoints/latest").exists()
    assert not is_locked(folder)
    return said.read_text()


def test_ctrl_c_saves_and_prints_the_command_to_resume(tmp_path: Path) -> None:
    said = stopped_by(signal.SIGINT, [sys.executable, "-m", "tutti", *TRAIN, "-n", "2"], tmp_path / "run")
    assert said.count("tutti: saving, then stopping; Ctrl-C again ends at once\n") == 1
    way = f"as it was asked to; continue it by: tutti train --resume {tmp_path}/run"
    found = re.search(rf"stopped after step ([\d,]+), {re.escape(way)}\n", said)
    assert found
    # So 'tutti watch' says the same.
    beats = RunFolder(tmp_path / "run").heartbeats().records
    assert [beat.step for beat in beats] == [int(found[1].replace(",", ""))] * 2
