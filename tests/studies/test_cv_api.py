"""`tutti.cross_validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import GroupShuffleSplit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.errors import BadOption, TuttiError, UnknownName
from tutti.records.run import Summary
from tutti.records.run_folder import RunFolder
from tutti.records.splits import read_split
from tutti.run.config import TrainConfig
from tutti.studies.cross_validation.result import CrossValidated

DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(60, 6)).astype(np.float32)
TARGETS = (INPUTS[:, 0] > 0).astype(np.int64)
GROUPS = np.arange(60) // 3


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise ArithmeticError("no model at all")


def _validated(out: Path, **changed: Any) -> CrossValidated:
    class Local(nn.Module):
        def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
            super().__init__()
            self.layer = nn.Linear(shape[0], outputs)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    torch.manual_seed(0)
    splitter = GroupShuffleSplit(3, test_size=0.25, random_state=1)
    given: dict[str, Any] = {
        "models": {"own": Local, "built": nn.Linear(6, 2), "mlp": "mlp"},
        "data": (INPUTS, TARGETS),
        "cv": splitter,
        "groups": GROUPS,
        "epochs": 2,
        "lr": 0.05,
        "threads": 1,
        "quiet": True,
    }
    return tutti.cross_validate(**{**given, **changed}, out=str(out))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> CrossValidated:
    return _validated(tmp_path_factory.mktemp("farms") / "farm", schedules=[None, "cosine"])


def test_models_and_data_of_a_script(result: CrossValidated) -> None:
    assert set(result.scores) == {
        f"{model}/{schedule}" for model in ("own", "built", "mlp") for schedule in ("none", "cosine")
    }
    assert all(not one.missing for one in result.scores.values())
    assert len(result.comparison) == 15
    assert result.best == max(result.scores, key=lambda name: result.scores[name].mean)
    assert result.best in str(result)
    assert len(str(result).splitlines()) == 1 + 6 + 5 + 1  # of 15 comparisons the 5 with the best


def test_groups_and_predictions(result: CrossValidated) -> None:
    found = result.predictions("own/none")
    assert len(found.rows) == len(found.outputs) == 45
    assert (TARGETS[found.rows] == found.targets).all()
    assert (found.outputs.argmax(1) == found.targets).mean() == pytest.approx(result.scores["own/none"].mean)
    fingerprint = str(np.load(result.folder / "splits.npz")["fingerprint"])
    for number in range(3):
        split = read_split(result.folder / "splits.npz", number, 60, fingerprint)
        assert not {*GROUPS[split.train]} & {*GROUPS[split.test]}
    with pytest.raises(UnknownName, match="did you mean 'own/none'"):
        result.predictions("own/non")


def test_finished_runs_are_kept_and_another_question_is_refused(result: CrossValidated) -> None:
    weights = result.folder / "jobs/own/none/fold-0/weights.safetensors"
    before = weights.stat().st_mtime_ns
    again = _validated(result.folder, schedules=[None, "cosine"], resume=True)
    assert weights.stat().st_mtime_ns == before
    folds = [{name: one.folds for name, one in found.scores.items()} for found in (again, result)]
    assert folds[0] == folds[1]
    with pytest.raises(tutti.BadRunFolder, match="go on with what is in it by resume"):
        _validated(result.folder)
    with pytest.raises(BadOption, match="another farm: candidates is"):
        _validated(result.folder, resume=True)
    with pytest.raises(BadOption, match="fingerprint"):
        _validated(result.folder, schedules=[None, "cosine"], data=(INPUTS + 1, TARGETS), resume=True)


def test_a_fold_is_an_ordinary_run_of_files(result: CrossValidated) -> None:
    config = TrainConfig.read(result.folder / "jobs/mlp/none/fold-1")
    again = tutti.train(
        config.model, config.data, data_options=config.data_options, split=config.split, seed=config.seed,
        epochs=2, lr=0.05, workers=1, threads=1, quiet=True,
    )  # fmt: skip
    assert again.summary.validation is not None
    assert again.summary.validation.metrics["accuracy"] == result.scores["mlp/none"].folds[1]


def test_arguments_of_a_single_run_can_be_used(tmp_path: Path) -> None:
    data = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    given: dict[str, Any] = {
        "data": DataLoader(data, batch_size=7),
        "class_weights": np.array([1, 2]),
        "sampling": TARGETS + 1,
        "augment": [lambda inputs, targets, _: (inputs, targets)],
        "cv": np.int64(2), "epochs": 1, "threads": 1, "quiet": True,
    }  # fmt: skip
    found = tutti.cross_validate("mlp", **given, out=str(tmp_path / "farm"))
    assert not found.failed
    config = RunFolder(found.folder / "jobs/mlp/none/fold-0").config()
    assert (config["batch_size"], config["class_weights"]) == (7, "1,2")


def missed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) != targets).float()


def _metrics(result: CrossValidated, name: str) -> list[dict[str, float]]:
    folds = [RunFolder(result.folder / f"jobs/{name}/fold-{fold}").read(Summary) for fold in range(2)]
    return [{} if one.validation is None else one.validation.metrics for one in folds]


def test_a_function_can_be_the_score(tmp_path: Path) -> None:
    given: dict[str, Any] = {"cv": 2, "groups": None, "metrics": ["auto", missed], "score": "missed:lower"}
    result = _validated(tmp_path / "farm", models={"mlp": "mlp", "built": nn.Linear(6, 2)}, **given)
    score = result.scores["mlp/none"]
    assert list(score.folds) == [one["missed"] for one in _metrics(result, "mlp/none")]
    assert [1 - one["accuracy"] for one in _metrics(result, "mlp/none")] == pytest.approx(score.folds)
    assert np.sum(score.confusion) == 60
    assert result.best == min(result.scores, key=lambda name: result.scores[name].mean)
    assert "in missed:lower" in result.comparison[0].sentence


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"models": ["mlp", "mlp"]}, BadOption, "2 models have the name 'mlp'"),
        ({"models": [nn.Linear(6, 2), nn.Linear(6, 2)]}, BadOption, "2 models have the name 'Linear'"),
        ({"cv": 1}, BadOption, "number of folds is 1"),
        ({"blocks": 0}, BadOption, "^blocks is 0"),
        ({"cv": "five"}, BadOption, "cv is a str"),
        ({"epoch": 2}, UnknownName, "did you mean 'epochs'"),
        ({"split": "a:0"}, BadOption, "split .*is for a single run"),
        ({"on_failure": "respawn"}, BadOption, "on_failure .*is for a single run"),
        ({"score": "acuracy"}, UnknownName, "did you mean 'accuracy'"),
        ({"score": len}, BadOption, "^score does not say"),
        ({"resume": True, "out": None}, BadOption, "needs out"),
        ({"groups": [1, 2]}, tutti.BadData, "60 samples"),
        ({"groups": np.array(["a", *range(59)], object)}, BadOption, "cannot split these 60 samples"),
        ({"block": "auto"}, BadOption, "^block is auto; give a whole number"),
        ({"job_timeout": 10}, BadOption, "job_timeout is '10'"),
        ({"sweep": {"lr": []}}, BadOption, "sweep lr is .*give a list of at least one value"),
        ({"sweep": {"lr": "0.1,0.2"}}, BadOption, "sweep lr is '0.1,0.2'; give a list"),
        ({"models": {"": "mlp", "..": "lenet"}}, BadOption, "2 models have the name -"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(6, 2).parameters(), lr=0.1)},
            BadOption,
            "the optimizer is an SGD over the parameters",
        ),
        ({"models": Broken, "cv": 2}, TuttiError, "no fold has finished.*no model at all"),
    ],
)
def test_bad_input(tmp_path: Path, changed: dict[str, Any], kind: type[TuttiError], message: str) -> None:
    with pytest.raises(kind, match=message):
        tutti.cross_validate(
            **{
                "models": "mlp", "data": (INPUTS, TARGETS), "cv": 3, "epochs": 1, "threads": 1, "quiet": True,
                "out": str(tmp_path / "farm"), **changed,
            }
        )  # fmt: skip
