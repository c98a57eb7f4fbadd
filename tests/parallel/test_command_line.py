"""`tutti train --parallel`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.cli.main import main

SMALL = ("lenet", "--data", "parallel.runs:images", "--epochs", "1", "--batch-size", "15")


def train(folder: Path, *words: str) -> int:
    return main(["train", *SMALL, "-n", "2", "--threads", "1", "--out", str(folder), *words])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["tensor", "sharded", "pipeline"])
def test_a_run_leaves_a_folder_that_evaluate_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    assert train(tmp_path / "run", "--parallel", way) == 0
    trained = capfd.readouterr().out
    assert "model lenet: 15,201 parameters" in trained
    assert json.loads((tmp_path / "run/config.json").read_text())["parallel"] == way
    (record,) = map(json.loads, (tmp_path / "run/history.jsonl").read_text().splitlines())
    assert len(record["ranks"]) == 2
    assert main(["evaluate", str(tmp_path / "run"), "-n", "1"]) == 0
    figures = capfd.readouterr().out.split("23 samples")[1].strip()
    assert figures in trained


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--parallel tensor --strategy hogwild", "those of 'hogwild' do not; leave --strategy out"),
        ("--parallel pipeline --parallel.microbatches 16", "a pipeline gets 15 samples of a batch"),
        ("--parallel tensor --parallel.plan parallel.models:number", "it must return a dict from names"),
        (
            "--parallel tensor --parallel.plan parallel.models:astray",
            "names '99', which the model does not have",
        ),
    ],
)
def test_what_does_not_go_together_is_one_clear_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert train(tmp_path / "run", *words.split()) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
