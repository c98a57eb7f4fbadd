"""Runs on a split of a file: nothing of what is held out is trained on, and it is predicted in the end."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tutti.cli.main import main
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import SamplePool
from tutti.data.sources import read_source
from tutti.errors import BadOption
from tutti.records.predictions import Predictions
from tutti.records.run_folder import PREDICTIONS
from tutti.records.splits import Split, write_splits
from tutti.run import evaluate
from tutti.run.build import open_config_data
from tutti.run.config import TrainConfig
from tutti.run.jobs import Recipe
from tutti.run.train_job import EvaluateJob

pytestmark = pytest.mark.usefixtures("nothing_beside")

X = np.random.default_rng(0).integers(0, 256, (90, 4, 3), dtype=np.uint8)
Y = (X.reshape(90, -1).sum(1) // 40 % 3).astype(np.int64)
HELD = np.flatnonzero(np.arange(90) % 4 == 1)
KEPT = np.setdiff1d(np.arange(90), HELD)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 3))


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, str]:
    """A file of samples, with a test part, and a split of it."""
    np.savez(tmp_path / "data.npz", x_train=X, y_train=Y, x_test=X[:7], y_test=Y[:7])
    outline = SamplePool.outline(read_source(tmp_path / "data.npz", {}))
    write_splits(
        tmp_path / "splits.npz",
        [Split.of(HELD, KEPT, 90, ""), Split.of(KEPT, HELD, 90, "")],
        outline.dataset.fingerprint,
    )
    return str(tmp_path / "data.npz"), f"{tmp_path}/splits.npz:1"


def train(given: Any, out: Path | None = None, **options: Any) -> tutti.Result:
    options = {"threads": 1, "workers": 1, "epochs": 2, "batch_size": 20, "lr": 0.01} | options
    return tutti.train(net, given, out=None if out is None else str(out), quiet=True, **options)


def test_a_run_on_a_split_is_the_run_on_its_training_samples(
    data: tuple[str, str], tmp_path: Path, capfd: Any
) -> None:
    file, place = data
    ours = train(file, tmp_path / "run", split=place, predictions=True, checkpoint="5 steps", strategy="solo")
    alone = train((X[KEPT], Y[KEPT]), validation=0.0, strategy="solo")
    theirs = alone.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.model.state_dict().items())
    assert ours.summary.test is None

    found = Predictions.read(tmp_path / "run" / PREDICTIONS)
    assert found.rows.tolist() == HELD.tolist()
    assert found.targets.tolist() == Y[HELD].tolist()
    seen = X[KEPT] / 255.0
    inputs = torch.from_numpy((X[HELD] / 255.0 - seen.mean()) / seen.std()).float()
    with torch.no_grad():
        wanted = ours.model.eval()(inputs.unsqueeze(1)).numpy()
    # Products of 12 and of 8 numbers in float32, of inputs that are rounded too.
    assert np.abs(found.outputs - wanted).max() <= 64 * np.finfo(np.float32).eps * np.abs(wanted).max()
    validated = ours.summary.validation
    assert validated is not None
    assert validated.metrics["accuracy"] == (found.outputs.argmax(1) == found.targets).mean()
    assert validated.samples == len(HELD)

    before = (tmp_path / "run" / PREDICTIONS).read_bytes()
    train(file, resume=tmp_path / "run" / "checkpoints" / "step-00000005")
    assert (tmp_path / "run" / PREDICTIONS).read_bytes() == before

    job = EvaluateJob(
        replace(ours.config, workers="auto"), str(tmp_path / "run"), "validation", str(tmp_path / "run")
    )
    with torch.no_grad():
        tested = ours.model.eval()(torch.from_numpy((X[:7] / 255.0 - seen.mean()) / seen.std()).float())
    share = (tested.argmax(1).numpy() == Y[:7]).mean()
    assert main(["evaluate", str(tmp_path / "run"), "-n", "1", "--trust"]) == 0
    assert f"test part of data: 7 samples, accuracy {share:.2%}" in capfd.readouterr().out
    (again,) = VirtualWorld(1).run(lambda comm: evaluate.work(comm, pickle.dumps(job)))
    assert again == validated


def test_a_share_of_the_samples_is_predicted_by_their_numbers(data: tuple[str, str], tmp_path: Path) -> None:
    ours = train(data[0], tmp_path / "run", predictions=True, validation=0.3)
    plain = train(data[0], validation=0.3)
    theirs = plain.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.model.state_dict().items())
    assert plain.summary.test == ours.summary.test is not None
    found = Predictions.read(tmp_path / "run" / PREDICTIONS)
    assert len(found.rows) == 27 == len(set(found.rows.tolist()))
    assert found.targets.tolist() == Y[found.rows].tolist()


def test_options_that_do_not_go_together_are_refused(
    data: tuple[str, str], tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(BadOption, match=r"does not go with --validation 0\.3"):
        TrainConfig(split="a.npz:0", validation=0.3)
    for wrong in ("a.npz", "a.npz:", ":1", "a.npz:-1", "a.npz:x"):
        with pytest.raises(BadOption, match="give a file of splits and the number of one"):
            TrainConfig(split=wrong)
    with pytest.raises(BadOption, match="predictions is for a run with a folder"):
        train(data[0], predictions=True)
    with pytest.raises(BadOption, match="predictions is for the validation part, and there is none"):
        train(data[0], tmp_path / "run", predictions=True, validation=0.0)
    assert main(["train", "mlp", "--data", data[0], "--split", data[1].replace(":1", ":2"), "-n", "1"]) == 2
    assert "has no split 2; they are numbered from 0" in capsys.readouterr().err


@pytest.mark.parametrize(("centre", "same"), [("10.0.0.1:7070", True), ("", False)])
def test_workers_of_a_centre_keep_the_same_samples_aside(
    data: tuple[str, str], centre: str, same: bool
) -> None:
    config = TrainConfig("mlp", data=data[0], strategy="async_diloco", strategy_options={"centre": centre})

    def aside(seed: int) -> list[int]:
        recipe = Recipe(replace(config, seed=seed))
        part = VirtualWorld(1).run(lambda comm: open_config_data(recipe, comm))[0].validation
        assert part is not None
        assert part.rows is not None
        return part.rows.tolist()

    assert (aside(1) == aside(2)) is same
