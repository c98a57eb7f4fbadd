"""The configuration of a resumed run: its own, except for the given options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.errors import BadCheckpoint, BadOption
from tutti.launch.launcher import LaunchContext, Launcher
from tutti.run import api, resume
from tutti.run.config import TrainConfig
from tutti.run.resume import placed

pytestmark = pytest.mark.usefixtures("nothing_beside")

INPUTS = torch.rand(120, 6, generator=torch.Generator().manual_seed(0))
DATA = (INPUTS, (INPUTS.sum(1) * 2).long() % 5)
SGD = {"optimizer": "sgd", "lr": 0.05, "schedule": "cosine", "batch_size": 24, "seed": 4, "validation": 0.2}


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5))


def train(folder: Path, **given: Any) -> tutti.Result:
    return tutti.train(net, DATA, out=str(folder), quiet=True, **given)


def begin(folder: Path, **given: Any) -> tutti.Result:
    """Train for five updates, of which the fourth is saved."""
    given = {"workers": 1, "threads": 1, "steps": 5, "checkpoint": "4 steps"} | given
    return train(folder, **given)


def test_options_left_out_keep_their_values(tmp_path: Path) -> None:
    begun = begin(tmp_path, **SGD)
    went_on = train(tmp_path, resume=tmp_path / "checkpoints" / "step-00000004")
    assert went_on.config.as_json() == begun.config.as_json()
    ours, theirs = went_on.model.state_dict(), begun.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_is_resumed_with_its_sample_weights(tmp_path: Path) -> None:
    heavy = torch.rand(120, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    begun = begin(tmp_path, **SGD, metrics="auc,accuracy", sample_weight=heavy)
    place = tmp_path / "checkpoints" / "step-00000004"
    with pytest.raises(BadCheckpoint, match="other data"):
        train(tmp_path, resume=place, sample_weight=heavy + 1)
    went_on = train(tmp_path, resume=place, sample_weight=heavy)
    ours, theirs = went_on.model.state_dict(), begun.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert went_on.history[-1].train == begun.history[-1].train


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = begin(tmp_path, **SGD, resume="auto")
    with monkeypatch.context() as patch:
        patch.setattr(api, "run", lambda job: pytest.fail("it is trained again"))
        for given in ({"resume": "auto", "steps": 5, **SGD}, {"resume": tmp_path}):
            again = train(tmp_path, **given)
            assert (again.summary, again.folder) == (begun.summary, begun.folder)
            assert again.history == begun.history
            assert again.config.as_json() == begun.config.as_json()
            ours, theirs = again.model.state_dict(), begun.model.state_dict()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        with pytest.raises(BadOption, match=r"lr=0.9 \(was 0.05\)"):
            train(tmp_path, resume="auto", lr=0.9)
    assert len(train(tmp_path, resume="auto", steps=6).history) == 2


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": "adam"}, "optimizer adam (was sgd)"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.05)}, "optimizer object:<lambda>"),
        ({"loss": loss}, "loss "),
        ({"batch_size": 32}, "batch_size=32 (was 24)"),
    ],
)
def test_options_that_affect_learning_must_not_change(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    begin(tmp_path, **SGD)
    with pytest.raises(BadOption) as refused:
        train(tmp_path, resume=tmp_path, **given)
    assert named in str(refused.value)


def test_a_change_of_a_part_leaves_its_options_out() -> None:
    before = TrainConfig(strategy="local", strategy_options={"period": 3}, steps=5)
    now = before.changed({"strategy": "easgd", "epochs": 2})
    assert (now.strategy, now.strategy_options, now.epochs, now.steps) == ("easgd", {}, 2, None)
    assert before.changed({"strategy": "local", "epochs": None}) == before


def test_other_workers_or_hosts_replace_the_earlier_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TrainConfig(workers="4", threads=2, hosts="a:2,b:2")
    assert placed(before, ()) == before
    assert placed(before, ("hosts",)) == TrainConfig(workers="auto", hosts="a:2,b:2")
    assert placed(before, ("workers",)) == TrainConfig(workers="4")
    alone = TrainConfig(workers="1", strategy="solo")
    assert placed(alone, ("workers",)).strategy == "auto"
    assert placed(alone, ("workers", "strategy")).strategy == "solo"
    with monkeypatch.context() as slurm:
        slurm.setenv("SLURM_JOB_ID", "7")
        slurm.setenv("SLURM_JOB_NODELIST", "c,d")
        assert placed(before, ()) == TrainConfig(workers="auto", hosts="slurm")
        assert placed(alone, ()) == TrainConfig(workers="auto")
        assert placed(before, ("workers",)) == TrainConfig(workers="4")
    monkeypatch.setattr(resume, "started_by", lambda: LaunchContext(Launcher.MPIRUN, rank=0, size=3))
    assert placed(before, ()) == TrainConfig(workers="auto")
