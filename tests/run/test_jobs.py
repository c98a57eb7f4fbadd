"""What is refused before any rank starts, and what is left of a run whose ranks fail."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import command
from tutti.cli.main import main
from tutti.errors import BadOption, PeerLost
from tutti.launch.mpirun import command_line, find_mpirun, settings
from tutti.launch.placement import Host
from tutti.records.run_folder import RunFolder
from tutti.run.config import TrainConfig
from tutti.run.rollback import take_back_after_me
from tutti.run.start import run
from tutti.run.train_job import TrainJob

KILLED = """
import os, signal
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        if self.training and Path("run/{file}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def make():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""


def killed_once_there_is(file: str) -> None:
    """Train, until ranks find the file in the run folder and are killed: they come to no clean-up."""
    Path("killed.py").write_text(KILLED.format(file=file))
    config = TrainConfig(model="killed.py:make", out="run", workers="2", epochs=3)
    with pytest.raises(PeerLost):
        run(TrainJob(config, quiet=True))


def test_a_run_whose_ranks_are_killed_in_its_first_epoch_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed_once_there_is("config.json")
    assert not Path("run").exists()


def test_a_run_whose_ranks_are_killed_later_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed_once_there_is("history.jsonl")
    assert Path("run/config.json").exists()
    assert not [path.name for path in Path("run").iterdir() if "weights" in path.name]


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


RAISING = """
from torch import nn
from tutti.launch.launcher import started_by

class Net(nn.Sequential):
    def forward(self, x):
        if self.training and started_by().rank == 1:
            raise ValueError("seven is not a colour")
        return super().forward(x)

def make():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""


@needs_mpirun
@pytest.mark.mpi
def test_under_the_users_mpirun_a_run_that_fails_in_its_first_epoch_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    model, out = f"{tmp_path / 'raising.py'}:make", tmp_path / "run"
    program = [*command(), "train", model, "--out", str(out), "--batch-size", "8"]
    found, hosts = find_mpirun(), (Host("localhost", 2),)
    launcher = command_line(found, hosts, [], [])
    environment = {**os.environ, **settings(found, hosts, os.environ)}
    done = subprocess.run(
        [*launcher[: launcher.index(sys.executable)], *program],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ValueError: seven is not a colour" in done.stderr
    wait_until(lambda: not out.exists())


def test_a_folder_is_taken_back_once_who_made_it_is_gone(tmp_path: Path) -> None:
    begun, not_begun = (RunFolder.create(tmp_path / name, "mlp", "digits") for name in ("begun", "not"))
    (begun.path / "history.jsonl").write_text("{}\n")
    child = os.fork()
    if child == 0:
        take_back_after_me(begun)
        take_back_after_me(not_begun)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    wait_until(lambda: not not_begun.path.exists())
    assert (begun.path / "history.jsonl").exists()


def wait_until(true: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("asked", "refused"), [("10s", True), ("off", False), ("60s", False)])
def test_a_time_out_that_nobody_would_watch_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, refused: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    job = TrainJob(TrainConfig(model="mlp", hang_timeout=asked, out="run"), quiet=True)
    with pytest.raises(BadOption, match="nobody would watch") if refused else nullcontext():
        job.check(job.placement())
