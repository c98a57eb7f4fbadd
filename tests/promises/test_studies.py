"""Many trainings: cross-validation, searches, ensembles, reports."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.promises.command import (
    LIMIT_S,
    history,
    json_lines,
    run,
    started,
    summary,
    wait_until,
    weights_sha256,
)

pytestmark = pytest.mark.timeout(400)

CV = "tutti cv mlp,gru --folds 2 --stratified --schedule none,cosine --epochs 1 --batch-size 64 --threads 1"


def networks(farm: Path) -> dict[str, str]:
    """The SHA-256 of the weights of each run of a farm."""
    runs = [file.parent for file in farm.glob("jobs/**/weights.safetensors")]
    return {str(one.relative_to(farm)): weights_sha256(one) for one in runs}


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation, one run after the other."""
    folder = tmp_path_factory.mktemp("farm")
    run(f"{CV} --blocks 1 --out farm", folder)
    return folder / "farm"


# Promise 7
def test_folds_are_bit_equal_for_any_number_of_blocks_and_after_a_kill(farm: Path, tmp_path: Path) -> None:
    with started(f"{CV} --blocks 2 --out farm", tmp_path) as first:
        wait_until(lambda: networks(tmp_path / "farm"))
        first.kill()
        first.communicate(timeout=LIMIT_S)
    run(f"{CV} --blocks 2 --out farm --resume", tmp_path)
    found = networks(farm)
    assert len(found) == 8  # 2 models x 2 schedules x 2 folds
    assert len(set(found.values())) == 8
    assert networks(tmp_path / "farm") == found


# Promise 7
def test_each_sample_is_held_out_once(farm: Path) -> None:
    held_out = [summary(file.parent)["validation"]["samples"] for file in farm.glob("jobs/**/summary.json")]
    assert sum(held_out) == 4 * 1438


# Promise 19
def test_an_ensemble_is_evaluated_like_a_run(farm: Path, tmp_path: Path) -> None:
    run(f"tutti ensemble {farm} --top 2 --out ensemble", tmp_path)
    assert "359" in run("tutti evaluate ensemble --part test", tmp_path).out
    run("tutti predict ensemble -o predictions.csv", tmp_path)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1 + 359


# Promise 19
def test_a_search_over_blocks_of_ranks_with_folds_inside_finds_the_best_options(tmp_path: Path) -> None:
    options = "--space.lr 0.00001,0.005 --sampler grid --folds 2 --block 2 --epochs 1 --threads 1 --out farm"
    run(f"tutti tune mlp {options}", tmp_path)
    with (tmp_path / "farm" / "trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert len(trials) == 2
    runs = [one.parent for one in (tmp_path / "farm").glob("jobs/**/summary.json")]
    assert len(runs) == 4
    scores: dict[float, list[float]] = {}
    for one in runs:
        assert summary(one)["world"]["ranks"] == 2
        rate = json.loads((one / "config.json").read_text())["lr"]
        scores.setdefault(rate, []).append(summary(one)["validation"]["metrics"]["accuracy"])
    assert min(scores[0.005]) > max(scores[0.00001])
    assert "0.005" in run("tutti report farm", tmp_path).out


# Promise 19
def test_trials_that_promise_nothing_end_early(tmp_path: Path) -> None:
    options = "--space.lr log:1e-7..1e-2 --pruner asha --blocks 1 --trials 8 --epochs 3 --seed 1 --out farm"
    run(f"tutti tune mlp {options}", tmp_path)
    epochs = [len(json_lines(one)) for one in (tmp_path / "farm").glob("jobs/**/history.jsonl")]
    assert len(epochs) == 8
    assert max(epochs) == 3
    assert min(epochs) == 1


# Promise 10
def test_a_report_has_confusion_classes_cores_and_loss(tmp_path: Path) -> None:
    for name, options in {"solo": "-n 1 --threads 1 --strategy solo", "sync": "-n 2"}.items():
        run(f"tutti train mlp --epochs 2 {options} --out {name}", tmp_path)
        test = summary(tmp_path / name)["test"]
        right = sum(row[kind] for kind, row in enumerate(test["confusion"]))
        assert sum(map(sum, test["confusion"])) == test["samples"] == 359
        assert right / 359 == pytest.approx(test["metrics"]["accuracy"])
        usage = json_lines(tmp_path / name / "usage.jsonl")
        assert {len(sample["ranks"]) for sample in usage} == {len(history(tmp_path / name)[0]["ranks"])}
        assert all(0 <= busy <= 100 for sample in usage for busy in sample["cores"])
    said = run("tutti report solo sync --out page", tmp_path).out
    assert "solo" in said
    assert "sync" in said
    assert {one.stem for one in (tmp_path / "page").rglob("*.svg")} >= {"confusion", "classes", "progress"}
    (page,) = (tmp_path / "page").rglob("*.html")
    assert "<script src=" not in page.read_text()  # it is read offline


# Promise 30
def test_tasks_of_a_job_array_share_one_farm(farm: Path, tmp_path: Path) -> None:
    line = f"{CV} --blocks 1 --out farm --resume"
    with (
        started(line, tmp_path, SLURM_ARRAY_TASK_ID="0") as one,
        started(line, tmp_path, SLURM_ARRAY_TASK_ID="1") as other,
    ):
        ends = [task.communicate(timeout=LIMIT_S) for task in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), ends
    assert networks(tmp_path / "farm") == networks(farm)
