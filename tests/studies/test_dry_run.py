"""A dry run prints the plan of a run, and makes no run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.cli.main import main


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_fills_in_defaults_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["train", "mlp", "-n", "2", "--threads", "1", "--lr", "0.5", "--dry-run"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("training: 20 epochs by adam")
    assert [*tmp_path.iterdir()] == []
    assert main([*words, "--json", "plan.json"]) == 0
    config = json.loads((tmp_path / "plan.json").read_text())
    wanted = {"strategy": "sync", "workers": "2", "lr": 0.5, "loss": "cross_entropy", "epochs": 20}
    assert wanted.items() <= config.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "auto"], "--dry-run starts no rank"),
        (["--strategy", "gem", "--servers", "9", "-n", "1", "--parallel", "tensor"], "--servers"),
        (["--optimizer", "nosuch"], "nosuch"),
        (["--schedule", "one_cycle", "--schedule.nosuch", "3"], "nosuch"),
        (["--weights", "nothere"], "nothere does not exist"),
        (["--predictions", "--validation", "0"], "--predictions is for the validation part"),
        (["--augment", "nosuch"], "nosuch"),
        (["--monitor", "val_loss", "--validation", "0"], "--monitor"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mlp", "--dry-run", *words]) == 2
    assert said in capsys.readouterr().err
