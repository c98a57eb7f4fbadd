"""`tutti ensemble` on a farm."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.cli import cv
from tutti.cli.main import main
from tutti.comm.virtual.world import VirtualWorld
from tutti.records.farm_folder import FarmFolder
from tutti.records.output_kinds import Kind
from tutti.records.predictions import Predictions
from tutti.run.config import TrainConfig
from tutti.studies.ensemble import evaluation
from tutti.studies.ensemble.choosing import choose, read_library
from tutti.studies.ensemble.evaluation_job import EnsemblePredictJob
from tutti.studies.ensemble.making import ensemble_of
from tutti.studies.ensemble.module import combined

MODELS = Path(__file__).with_name("cv_models.py")
SAMPLES = 90


def _images(path: Path, seed: int) -> Path:
    """Images of three classes that differ in brightness, with a test part."""
    draw = np.random.default_rng(seed)
    targets = np.arange(SAMPLES) % 3
    noise = draw.integers(0, 200, (SAMPLES, 8, 8), dtype=np.uint8)
    inputs = noise + 20 * targets.astype(np.uint8)[:, None, None]
    np.savez(path, x_train=inputs[:60], y_train=targets[:60], x_test=inputs[60:], y_test=targets[60:])
    return path


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation of two models on three folds."""
    folder = tmp_path_factory.mktemp("farms")
    data = _images(folder / "images.npz", 0)
    words = ["cv", f"mlp,{MODELS}:linear", "--data", str(data), "--folds", "3", "--epochs", "2"]
    words += ["--threads", "1", "--batch-size", "16", "--blocks", "1", "--out", str(folder / "farm")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cv, "write_cv_page", lambda folder, found: folder.path)  # it takes seconds
        assert main(words) == 0
    return folder / "farm"


def test_the_gain_over_the_best_single_model_is_shown(farm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("mean", "greedy"):
        assert main(["ensemble", str(farm), "--method", method, "--dry-run", "--trust"]) == 0
        said = capsys.readouterr().out
        assert "linear/none" in said
        assert "the ensemble, chosen on other folds" in said
        assert "the best single model" in said.splitlines()[-1]


def test_bad_input(farm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["ensemble", *words]) == 2
        return capsys.readouterr().err

    assert "--top is 3, and the candidates that have finished are 2: mlp/none, linear" in refused(
        str(farm), "--top", "3"
    )
    assert "--top is 0" in refused(str(farm), "--top", "0")
    assert "no folder of a farm" in refused(str(tmp_path))
    assert "does not exist" in refused(str(tmp_path / "none"))
    assert "exists already; name another folder" in refused(str(farm), "--out", str(farm))
    assert "'weigthed'" in refused(str(farm), "--method", "weigthed")
    copy = tmp_path / "copy"
    shutil.copytree(farm, copy, symlinks=True)
    (copy / "jobs/linear/none/fold-1/summary.json").unlink()
    assert "candidates that have finished are 1: mlp/none" in refused(str(copy), "--top", "2")
    assert main(["ensemble", str(copy), "--dry-run"]) == 0
    assert "not all folds have finished: linear/none" in capsys.readouterr().out
    shutil.copy2(farm / "jobs/linear/none/fold-1/summary.json", copy / "jobs/linear/none/fold-1")
    config = copy / "jobs/linear/none/fold-0/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model": "object:Mine"}))
    said = refused(str(copy), "--method", "mean", "--trust")
    assert "the model of linear/none was a Python object ('Mine'), which a saved" in said
    (copy / "jobs/linear/none/fold-1/summary.json").unlink()
    (copy / "jobs/mlp/none/fold-0/summary.json").unlink()
    assert "no candidate of" in refused(str(copy))


def test_an_ensemble_does_not_need_a_loss_that_was_a_python_object(farm: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(farm, copy, symlinks=True)
    for path in copy.glob("jobs/*/*/*/config.json"):
        asked = {"loss": "object:<lambda>", "metrics": "object:mine"}
        path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    folder = FarmFolder.open(copy)
    library, _ = read_library(folder)
    record, _ = ensemble_of(folder, choose(library, [0.5] * 3, "mean"), "mean", trust=True)
    assert {(one.config["loss"], one.config["metrics"]) for one in record.members} == {("auto", "auto")}


@pytest.fixture(scope="module")
def ensemble(farm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both candidates."""
    out = tmp_path_factory.mktemp("ensembles") / "both"
    assert main(["ensemble", str(farm), "--method", "mean", "--out", str(out), "--trust"]) == 0
    return out


def _test_part(farm: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(farm.parent / "images.npz") as file:
        return torch.from_numpy(file["x_test"])[:, None], torch.from_numpy(file["y_test"])


def test_a_saved_ensemble_is_a_module_that_combines_its_networks(farm: Path, ensemble: Path) -> None:
    loaded = tutti.load_ensemble(ensemble, trust=True)
    assert not loaded.training
    inputs, targets = _test_part(farm)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=7)
    with torch.no_grad():
        found = torch.cat([loaded(batch) for batch, _ in loader])
        alone = np.stack([member(inputs).numpy() for member in loaded.members])
    record = loaded.record
    candidates = [one.candidate for one in record.members]
    assert sorted(candidates) == ["linear/none"] * 3 + ["mlp/none"] * 3
    values = np.stack([Kind.CLASSES.values(one) for one in alone])
    np.testing.assert_allclose(found.exp().numpy(), values.mean(0), rtol=1e-5, atol=1e-6)
    assert found.exp().sum(1).numpy() == pytest.approx(np.ones(30), rel=1e-5)


def test_the_networks_of_an_ensemble_are_those_of_the_folds(farm: Path, ensemble: Path) -> None:
    loaded = tutti.load_ensemble(ensemble, trust=True)
    with np.load(farm.parent / "images.npz") as file:
        inputs = torch.from_numpy(file["x_train"])[:, None]
    counts = {"mlp/none": 0, "linear/none": 0}
    for member, record in zip(loaded.members, loaded.record.members, strict=True):
        path = farm / "jobs" / record.candidate / f"fold-{counts[record.candidate]}" / "predictions.npz"
        counts[record.candidate] += 1
        before = Predictions.read(path)
        with torch.no_grad():
            outputs = member(inputs[torch.from_numpy(before.rows)]).numpy()
        np.testing.assert_allclose(outputs, before.outputs, rtol=1e-5, atol=1e-6)
    assert counts == {"mlp/none": 3, "linear/none": 3}


def test_an_ensemble_is_evaluated_the_same_on_any_number_of_ranks(
    farm: Path, ensemble: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs, targets = _test_part(farm)
    with torch.no_grad():
        right = (tutti.load_ensemble(ensemble, trust=True)(inputs).argmax(1) == targets).double().mean()
    said = []
    for ranks in ("1", "2"):
        assert main(["evaluate", str(ensemble), "--trust", "-n", ranks]) == 0
        said.append(capfd.readouterr().out.partition("\n")[2])
    assert said[0] == said[1]
    assert f"test part of images: 30 samples, accuracy {right:.2%}" in said[0]
    other = _images(tmp_path / "other.npz", 1)
    words = ["--trust", "-n", "1", "--data", str(other), "--part", "train"]
    assert main(["evaluate", str(ensemble), *words]) == 0
    assert "train part of other: 60 samples" in capfd.readouterr().out


def test_an_ensemble_predicts_into_a_file_and_its_plain_form_gives_the_same(
    farm: Path, ensemble: Path, tmp_path: Path
) -> None:
    inputs, _ = _test_part(farm)
    loaded = tutti.load_ensemble(ensemble, trust=True)
    np.save(tmp_path / "new.npy", inputs.numpy())
    config = TrainConfig(data=str(tmp_path / "new.npy"))
    job = EnsemblePredictJob(config, str(ensemble), str(tmp_path / "out.npy"), other_data=True, trust=True)
    VirtualWorld(2).run(lambda comm: evaluation.predict_work(comm, pickle.dumps(job)))
    found = np.load(tmp_path / "out.npy")
    assert np.array_equal(found, loaded.probabilities(inputs).astype(np.float32))
    with torch.no_grad():
        torch.testing.assert_close(loaded.plain()(inputs), loaded(inputs), rtol=1e-5, atol=1e-5)


def test_an_ensemble_of_another_user_runs_no_code(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ensemble, copy)
    assert main(["evaluate", str(copy)]) == 2
    assert "would run code" in capsys.readouterr().err
    with pytest.raises(tutti.UserError, match="would run code"):
        tutti.load_ensemble(copy)
    assert tutti.load_ensemble(copy, trust=True)
    with pytest.raises(tutti.BadRunFolder, match="so it is no ensemble"):
        tutti.load_ensemble(tmp_path)


@pytest.mark.parametrize("kind", list(Kind))
def test_combined_outputs_stand_for_the_weighted_values(kind: Kind) -> None:
    values = torch.from_numpy(kind.values(np.random.default_rng(0).normal(size=(10, 4))).reshape(2, 5, 4))
    found = combined((0.25, 0.75), kind, [*values]).numpy()
    np.testing.assert_allclose(kind.values(found), values[0] / 4 + values[1] * 3 / 4, rtol=1e-12)
