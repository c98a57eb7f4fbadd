"""Farms handed to Slurm: the script, and what is said where it cannot be submitted."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.errors import UserError
from tutti.farm.slurm import ArrayJob
from tutti.records.farm_folder import FarmFolder, JobState

SBATCH = """\
#!/bin/sh
test "$1" = --parsable || exit 1
cp "$2" "$0.script"
echo "42;cluster"
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of Slurm's; returns where it puts the script that it is given."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    return program.with_suffix(".script")


def _words(farm: Path, *more: str) -> list[str]:
    return ["cv", "mlp", "--data", "digits", "--folds", "2", "--steps", "2", "--out", str(farm), *more]


def test_the_tasks_of_the_array_do_the_jobs(
    sbatch: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    farm = tmp_path / "the farm"
    assert main(_words(farm, "--on", "slurm", "--blocks", "3", "--threads", "1")) == 0
    said = capfd.readouterr().out
    assert f"submitted {farm / 'slurm.sh'} as job 42, an array of 3 tasks\n" in said
    assert f": tutti watch '{farm}'; " in said
    assert sbatch.read_text() == (farm / "slurm.sh").read_text()
    folder = FarmFolder.open(farm)
    jobs = [f"mlp/none/fold-{fold}" for fold in (0, 1)]
    assert [folder.state(job) for job in jobs] == [JobState.WAITING] * 2
    command = shlex.split(sbatch.read_text().splitlines()[-1])
    assert command[:5] == ["exec", sys.executable, "-P", "-m", "tutti"]
    assert main(command[5:]) == 0
    assert [folder.state(job) for job in jobs] == [JobState.FINISHED] * 2


def test_the_script_asks_for_the_cores_of_a_block_and_takes_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "it's 100% $HOME"
    here.mkdir()
    monkeypatch.chdir(here)
    script = ArrayJob(["tune", "a b"], tasks=8, ranks=3, threads=2).script(Path("farm"))
    lines = script.splitlines()
    assert "--array=0-7" in lines[1]
    assert "--cpus-per-task=6" in lines[2]
    assert shlex.split(lines[1])[-1] == f"--output={tmp_path}/it's 100%% $HOME/farm/slurm-%A-%a.txt"
    shown = f"{shlex.quote(sys.executable)}() {{ pwd; printf '%s\\n' \"$@\"; }}\n"
    said = subprocess.run(
        ["bash", "-c", shown + script.replace("exec ", "")],
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout.splitlines()[0] == str(here)
    words = ["-P", "-m", "tutti", "tune", "a b", "--on", "here", "--resume", "--out", str(here / "farm")]
    assert said.stdout.splitlines()[1:] == [*words, "--blocks", "1", "--threads", "2"]


def test_without_slurm_the_script_is_left_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    farm = tmp_path / "farm"
    assert main(_words(farm, "--on", "slurm")) == 2
    assert "--on slurm needs --blocks N" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    farm.mkdir()
    with pytest.raises(UserError, match="sbatch cannot be started") as caught:
        ArrayJob(["cv"], tasks=1, ranks=1, threads=1).submit(farm)
    assert f"the job script is {farm / 'slurm.sh'}" in str(caught.value)
    assert (farm / "slurm.sh").exists()
