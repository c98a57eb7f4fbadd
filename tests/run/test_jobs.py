"""Which jobs are refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import BadOption, UserError
from tutti.launch import stop_request
from tutti.run import start
from tutti.run.checks import check_recipe
from tutti.run.config import TrainConfig
from tutti.run.train_job import TrainJob


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"batch_size": 16}, 24, "a batch of 16 samples cannot be split over 24 ranks"),
        ({"strategy": "solo"}, 2, "runs on 1 worker, not 2"),
        ({"strategy": "sinc"}, 2, "did you mean 'sync'"),
        ({"strategy_options": {"evry": 2}}, 2, "did you mean 'every'"),
        ({"model": "lennet"}, 2, "did you mean 'lenet'"),
        ({"loss": "cross_entropi"}, 2, "did you mean 'cross_entropy'"),
        ({"metrics": "accurracy"}, 2, "did you mean 'accuracy'"),
        ({"monitor": "val_acuracy"}, 2, "did you mean 'accuracy'"),
        ({"monitor": "train_mae", "metrics": "accuracy"}, 2, "unknown metric 'mae' of --monitor"),
        ({"schedule": "OneCycel"}, 2, "did you mean 'OneCycleLR'"),
        ({"optimizer": "sgd", "optimizer_options": {"momentun": 0.9}}, 2, "did you mean 'momentum'"),
        ({"strategy": "easgd", "balance": "speed"}, 2, "leave --balance out"),
    ],
)
def test_names_and_options_are_checked_before_any_data_is_read(
    options: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_recipe(TrainJob(TrainConfig(**options)), ranks)
    assert message in str(caught.value)


def test_files_are_missed_before_any_rank_starts_without_torch_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tutti", "train", "net.py:net", "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")  # no plan
    assert "net.py:net' is in no file" in done.stderr


@pytest.mark.parametrize(("asked", "refused"), [("10s", True), ("off", False), ("60s", False)])
def test_a_timeout_without_a_supervisor_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, refused: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    job = TrainJob(TrainConfig(model="mlp", hang_timeout=asked, out="run"), quiet=True)
    with pytest.raises(BadOption, match="not mpirun") if refused else nullcontext():
        job.check(job.placement())


@pytest.mark.parametrize("writes", [True, False])
def test_a_training_under_mpirun_notes_requests_from_its_beginning_if_it_can_save(
    monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(stop_request, "_early", False)
    monkeypatch.setattr(start, "start", lambda *_, **__: signal.getsignal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        handler = start.run(TrainJob(TrainConfig(model="mlp"), write=writes, quiet=True))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (handler != signal.SIG_DFL) is writes
