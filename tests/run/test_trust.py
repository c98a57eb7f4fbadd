"""Code that a configuration file names runs only where the user says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.records.run_folder import WEIGHTS, RunFolder
from tutti.run.config import TrainConfig
from tutti.run.trust import Untrusted, code_named

pytestmark = pytest.mark.usefixtures("nothing_beside")

CODE = "code_of_somebody.py"
MODEL = """from pathlib import Path
from torch import nn
Path(__file__).with_suffix(".ran").touch()
def net(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a run leaves it, whose model is code beside it; the working directory has that code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / CODE).write_text(MODEL)
    folder = tmp_path / "run"
    RunFolder.create(folder, "net", "digits").write_config({"model": f"{CODE}:net"})
    return folder


def test_a_configuration_file_may_have_code_run_only_with_trust(run: Path) -> None:
    with pytest.raises(Untrusted) as caught:
        TrainConfig.read(run)
    assert f"model '{CODE}:net'" in str(caught.value)
    assert TrainConfig.read(run, trust=True).model == f"{CODE}:net"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model": "mlp", "lr": 0.1, "data": "some/where.npz"}, {}),
        ({"split": "splits.npz:0", "out": "runs/a:b"}, {}),
        ({"strategy_options": {"centre": "10.0.0.1:7070", "key": "key.txt"}}, {}),
        ({"data": "there.py"}, {"data": "there.py"}),
        ({"metrics": "accuracy,os:getpid"}, {"metrics": "accuracy,os:getpid"}),
        ({"augment": "a.py:f, crop,b.py:g"}, {"augment": "a.py:f, crop,b.py:g"}),
        ({"schedule_options": {"lr_lambda": "os:abort"}}, {"schedule.lr_lambda": "os:abort"}),
        ({"model_options": {"parts": [1, "os:abort"]}}, {"model.parts": "os:abort"}),
        ({"hosts": "elsewhere"}, {"hosts": "elsewhere"}),
    ],
)
def test_code_is_found_wherever_it_is_named(config: dict[str, object], names: dict[str, str]) -> None:
    assert code_named(config) == names


def test_replaced_fields_need_no_trust(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps({"model": "mlp", "data": "os:abort"}))
    assert TrainConfig.read(path, replaced=["data"]).model == "mlp"
    with pytest.raises(Untrusted):
        TrainConfig.read(path, replaced=["model"])


@pytest.mark.parametrize("words", [["evaluate", "run"], ["train", "--config", "run"]])
def test_the_command_line_runs_no_code_that_a_foreign_folder_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (run / WEIGHTS).touch()
    assert main(words) == 2
    assert f"{CODE}:net" in capsys.readouterr().err
    assert not (tmp_path / CODE).with_suffix(".ran").exists()


def test_code_of_a_run_runs_again_if_it_is_named_or_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / CODE).write_text(MODEL)
    words = ["-n", "1", "--checkpoint", "1 epoch"]
    assert main(["train", f"{CODE}:net", *words, "--epochs", "1", "--out", "run"]) == 0
    assert main(["evaluate", "run", "-n", "1"]) == 2
    assert main(["evaluate", "run", "-n", "1", "--trust"]) == 0
    assert main(["train", "--resume", "run", "--epochs", "2"]) == 2
    assert main(["train", f"{CODE}:net", "--resume", "run", "--epochs", "2"]) == 0
