"""What is refused before any rank starts, and what is left of a run whose ranks fail."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.errors import BadOption, PeerLost
from tutti.run.config import TrainConfig
from tutti.run.start import run
from tutti.run.train_job import TrainJob

KILLED = """
import os, shutil, signal
from pathlib import Path
from torch import nn
from tutti.launch.launcher import started_by

class Net(nn.Sequential):
    def forward(self, x):
        if self.training and started_by().rank == 0 and Path("run/{file}").exists():
            {first}
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def make():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""


def killed_once_there_is(file: str, first: str = "") -> None:
    """Train until rank 0 finds the file in the run folder, runs a statement and is killed."""
    Path("killed.py").write_text(KILLED.format(file=file, first=first))
    config = TrainConfig(model="killed.py:make", out="run", workers="2", epochs=3)
    with pytest.raises(PeerLost):
        run(TrainJob(config, quiet=True))


@pytest.mark.parametrize("file", ["config.json", "history.jsonl"])
def test_a_run_whose_rank_is_killed_keeps_its_folder(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed_once_there_is(file)
    assert Path("run/config.json").exists()


def test_a_folder_that_has_taken_the_place_of_a_failed_run_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replace = 'shutil.rmtree("run"); os.mkdir("run"); Path("run/config.json").write_text("another")'
    killed_once_there_is("config.json", first=replace)
    assert Path("run/config.json").read_text() == "another"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train mlp -n 24 --batch-size 16", "a batch of 16 samples cannot be split over 24 ranks"),
        ("train mlp -n 2 --strategy solo", "runs on 1 worker, not 2"),
        ("train lennet -n 2", "did you mean 'lenet'"),
        ("train mlp --data mnits -n 2", "did you mean 'mnist'"),
        ("train mlp --loss cross_entropi -n 2", "did you mean 'cross_entropy'"),
        ("train mlp --metrics accurracy -n 2", "did you mean 'accuracy'"),
        ("train mlp --monitor val_acuracy -n 2", "did you mean 'accuracy'"),
        ("train mlp --monitor train_mae --metrics accuracy -n 2", "unknown metric 'mae' of --monitor"),
        ("train mlp --schedule OneCycel -n 2", "did you mean 'OneCycleLR'"),
        ("train mlp --optimizer sgd --optimizer.momentun 0.9 -n 2", "did you mean 'momentum'"),
        ("train mlp --strategy easgd --balance speed -n 2", "use --balance queue"),
        ("train mlp --out full -n 2", "is not empty"),
        ("verify mlp -n 2 --strategy easgd", "does not follow sequential training"),
        ("verify mlp -n 24 --batch-size 16", "a batch of 16 samples cannot be split over 24 ranks"),
        ("plan lennet -n 2", "did you mean 'lenet'"),
        ("plan mlp -n 24 --batch-size 16", "a batch of 16 samples cannot be split over 24 ranks"),
        ("compare mlp -n 24 --batch-size 16", "a batch of 16 samples cannot be split over 24 ranks"),
        ("compare lennet -n 2", "did you mean 'lenet'"),
        ("layouts mlp --loss cross_entropi", "did you mean 'cross_entropy'"),
        ("train mlp --metrics accuracy,full/no.py:f -n 2", "the metric 'full/no.py:f' is in no file"),
        ("train mlp --data full/set.npz -n 2", "there is no full/set.npz"),
        ("train mlp --data full/other.bin -n 2", "is of no known kind"),
    ],
)
def test_what_no_rank_could_mend_is_refused_before_any_starts(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object, **__: object) -> object:
        raise AssertionError("ranks were started")

    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/other.bin").write_text("something")
    monkeypatch.setattr("tutti.run.start.start", start)
    importlib.import_module("torch")  # Without it the ranks would have to find out.
    assert main(shlex.split(words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("net.py:net", "the model 'net.py:net' is in no file"),
        ("mlp --data empty.npz", "is empty"),
    ],
)
def test_files_are_missed_before_any_rank_starts_without_torch_too(
    words: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.npz").touch()
    command = [sys.executable, "-m", "tutti", "train", *words.split(), "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")  # no plan
    assert message in done.stderr


@pytest.mark.parametrize(("asked", "refused"), [("10s", True), ("off", False), ("60s", False)])
def test_a_time_out_that_nobody_would_watch_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, refused: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    job = TrainJob(TrainConfig(model="mlp", hang_timeout=asked, out="run"), quiet=True)
    with pytest.raises(BadOption, match="nobody would watch") if refused else nullcontext():
        job.check(job.placement())
