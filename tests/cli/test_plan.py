"""`tutti plan` and `tutti train --plan auto`: their output, and refusals."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import command
from tutti.cli.main import main

SMALL = ("mlp", "--model.hidden", "16")


@pytest.mark.serial
def test_a_plan_prints_a_table_and_a_command_and_writes_json(tmp_path: Path) -> None:
    choice = ["-n", "2", "--precision", "fp32", "--batch-sizes", "16,64"]
    words = ["plan", *SMALL, *choice, "--budget", "4", "--json", "plan.json"]
    done = subprocess.run([*command(), *words], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0
    assert "error" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "plan: measuring for at most 4 s once the ranks have started"
    assert lines[1].startswith("model mlp: 1,210 parameters")
    assert sum(line.split()[:2] == ["2", "1"] for line in lines) == 2
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["pick"]["ranks"] == 2
    assert found["command"] == lines[-1]
    assert lines[-1].startswith("tutti train mlp --model.hidden 16 -n 2 --threads 1 --batch-size ")
    assert {one["batch_size"] for one in found["candidates"]} == {16, 64}
    assert {"samples_per_s", "turns", "remark"} <= found["candidates"][0].keys()


@pytest.mark.serial
def test_a_planned_run_writes_the_pick_and_can_be_repeated_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    chosen = ["--plan", "fresh", "--budget", "0.5"]
    assert main(["train", *SMALL, "--epochs", "1", "-n", "1", *chosen, "--out", "a"]) == 0
    planned = capsys.readouterr().out
    assert planned.startswith("plan: measuring for at most 5% of the run, and 0.5 s\nplan: measured ")
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["workers"], config["layout"]) == ("1", "contiguous")
    assert config["precision"] == "fp32"  # The run is too short to compare losses.
    assert main(["train", "--config", "a", "--out", "b"]) == 0
    assert "plan: measuring" not in capsys.readouterr().out
    assert json.loads((tmp_path / "b/config.json").read_text()) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mpl --json plan.json", "unknown model 'mpl'; did you mean 'mlp'?"),
        ("--data mnits", "unknown data set 'mnits'"),
        ("--strategy easgd", "use 'tutti compare'"),
        ("--budget 0", "--budget is 0"),
        ("--budget soon", "'soon' is not a number"),
        ("--batch-sizes 64,x", "--batch-sizes is '64,x'"),
        ("--batch-size 64 --batch-sizes 32,64", "both --batch-size and --batch-sizes are given"),
        ("--precision bf16 --precisions fp32,bf16", "both --precision and --precisions are given"),
        ("--precisions fp23", "did you mean 'fp32'?"),
        ("--hosts a:2", "--hosts"),
        ("--json no/plan.json", "cannot write --json no/plan.json"),
    ],
)
def test_bad_input_is_one_clear_message(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = [] if "hosts" in words else ["-n", "1", "--threads", "1"]
    assert main(["plan", *words.split(), *alone]) == 2
    assert not list(tmp_path.iterdir())
    out, err = capsys.readouterr()
    shown = err.splitlines()[-1]
    assert shown.startswith("tutti: error: ")
    assert message in shown
    assert ("measuring" in out) == ("unknown model" in message or "unknown data set" in message)


def test_an_unknown_kind_of_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", "best"]) == 2
    assert "'best'" in capsys.readouterr().err
