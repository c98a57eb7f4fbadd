"""Tests of `tutti ensemble` on a farm."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tutti.cli.main import main

MODELS = Path(__file__).with_name("cv_models.py")
SAMPLES = 90


def _images(path: Path, seed: int) -> Path:
    """Images of three classes that differ in brightness."""
    draw = np.random.default_rng(seed)
    targets = np.arange(SAMPLES) % 3
    noise = draw.integers(0, 200, (SAMPLES, 8, 8), dtype=np.uint8)
    np.savez(path, x=noise + 20 * targets.astype(np.uint8)[:, None, None], y=targets)
    return path


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation of two models on three folds."""
    folder = tmp_path_factory.mktemp("farms")
    data = _images(folder / "images.npz", 0)
    words = [
        "cv",
        f"mlp,{MODELS}:linear",
        "--data",
        str(data),
        "--folds",
        "3",
        "--epochs",
        "2",
        "--threads",
        "1",
    ]
    assert main([*words, "--batch-size", "16", "--blocks", "1", "--out", str(folder / "farm")]) == 0
    return folder / "farm"


def test_the_gain_over_the_best_single_model_is_said(farm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("mean", "weighted", "stacking", "greedy"):
        assert main(["ensemble", str(farm), "--method", method]) == 0
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
    assert "'weigthed'" in refused(str(farm), "--method", "weigthed")
    copy = tmp_path / "copy"
    shutil.copytree(farm, copy)
    (copy / "jobs/linear/none/fold-1/summary.json").unlink()
    assert "candidates that have finished are 1: mlp/none" in refused(str(copy), "--top", "2")
    assert main(["ensemble", str(copy)]) == 0
    assert "not all of its folds have finished: linear/none" in capsys.readouterr().out
    (copy / "jobs/mlp/none/fold-0/summary.json").unlink()
    assert "no candidate of" in refused(str(copy))
