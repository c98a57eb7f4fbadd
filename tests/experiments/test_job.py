"""What is left of a run whose ranks fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import PeerLost
from tutti.experiments.config import TrainConfig
from tutti.experiments.job import TrainJob, run

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
        run("tutti.experiments.train:work", TrainJob(config, quiet=True), quiet=True)


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
