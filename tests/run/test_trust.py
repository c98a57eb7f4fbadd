"""Code that a configuration names runs only where this user has written that configuration, or says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.records.run_folder import CONFIG, SEAL, WEIGHTS, RunFolder
from tutti.run.config import TrainConfig
from tutti.run.trust import Untrusted, code_named, seal, state_folder

pytestmark = pytest.mark.usefixtures("nothing_beside")

CODE = "code_of_somebody.py"
MODEL = """from pathlib import Path
from torch import nn
Path(__file__).with_suffix(".ran").touch()
def net(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a run leaves it, whose model is code beside it; the working directory has that code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / CODE).write_text(MODEL)
    folder = tmp_path / "run"
    write(folder, {"model": f"{CODE}:net"})
    return folder


def write(path: Path, config: dict[str, object]) -> None:
    """Write a configuration as a run does."""
    folder = RunFolder.create(path, "net", "digits")
    folder.write_config(config, seal(config))


def test_what_a_run_of_this_user_has_written_is_trusted(run: Path) -> None:
    assert TrainConfig.read(run).model == f"{CODE}:net"


def test_the_key_is_for_this_user_alone(run: Path) -> None:
    assert (state_folder() / "key").stat().st_mode & 0o777 == 0o600


def test_a_configuration_without_a_seal_may_not_have_code_run(run: Path) -> None:
    (run / SEAL).unlink()
    with pytest.raises(Untrusted) as caught:
        TrainConfig.read(run)
    assert f"model '{CODE}:net';" in str(caught.value)
    assert TrainConfig.read(run, trust=True).model == f"{CODE}:net"


def test_a_configuration_that_was_changed_is_not_trusted(run: Path) -> None:
    (run / CONFIG).write_text(json.dumps({"model": "os:system"}))
    with pytest.raises(Untrusted, match="os:system"):
        TrainConfig.read(run)


def test_a_copy_beside_other_code_is_not_trusted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    shutil.copytree(run, trap / "run")
    (trap / CODE).write_text(MODEL)
    monkeypatch.chdir(trap)
    with pytest.raises(Untrusted):
        TrainConfig.read("run")


def test_a_module_that_lies_elsewhere_now_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module_of_somebody.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path / "mine")
    write(tmp_path / "run", {"model": "module_of_somebody:net"})
    assert TrainConfig.read(tmp_path / "run").model == "module_of_somebody:net"
    monkeypatch.chdir(tmp_path / "theirs")
    with pytest.raises(Untrusted):
        TrainConfig.read(tmp_path / "run")


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_key_that_others_may_know_is_none(run: Path, mode: int) -> None:
    (state_folder() / "key").chmod(mode)
    with pytest.raises(Untrusted):
        TrainConfig.read(run)


def test_without_a_place_for_a_key_there_is_no_seal_and_no_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    write(tmp_path / "run", {"model": "os:system"})
    assert not (tmp_path / "run" / SEAL).exists()
    with pytest.raises(Untrusted):
        TrainConfig.read(tmp_path / "run")


def test_built_in_names_need_no_trust(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model": "mlp", "data": "digits", "model_options": {"hidden": [8]}}))
    assert TrainConfig.read(path).model == "mlp"
    assert seal({"model": "mlp"}) is None
    assert not state_folder().exists()


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model": "mlp", "lr": 0.1, "data": "some/where.npz"}, {}),
        ({"data": "there.py"}, {"data": "there.py"}),
        ({"metrics": "accuracy,os:getpid"}, {"metrics": "os:getpid"}),
        ({"augment": "a.py:f, crop,b.py:g"}, {"augment": "a.py:f", "augment 2": "b.py:g"}),
        ({"schedule_options": {"lr_lambda": "os:abort"}}, {"schedule.lr_lambda": "os:abort"}),
        ({"model_options": {"parts": [1, "os:abort"]}}, {"model.parts": "os:abort"}),
        ({"hosts": "elsewhere"}, {"hosts": "elsewhere"}),
    ],
)
def test_code_is_found_wherever_it_is_named(config: dict[str, object], names: dict[str, str]) -> None:
    assert code_named(config) == names


def test_what_is_replaced_need_not_be_trusted(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps({"model": "mlp", "data": "os:abort"}))
    assert TrainConfig.read(path, replaced=["data"]).model == "mlp"
    with pytest.raises(Untrusted):
        TrainConfig.read(path, replaced=["model"])


@pytest.mark.parametrize("words", [["evaluate", "run"], ["train", "--config", "run"]])
def test_the_command_line_runs_no_code_that_a_foreign_folder_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (run / SEAL).unlink()
    (run / WEIGHTS).touch()
    assert main(words) == 2
    assert f"{CODE}:net" in capsys.readouterr().err
    assert not (tmp_path / CODE).with_suffix(".ran").exists()


def test_a_run_is_sealed_evaluated_and_after_a_change_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / CODE).write_text(MODEL)
    assert main(["train", f"{CODE}:net", "-n", "1", "--steps", "2", "--out", "run"]) == 0
    assert main(["evaluate", "run", "-n", "1"]) == 0
    (tmp_path / "run" / SEAL).write_text("another\n")
    assert main(["evaluate", "run", "-n", "1"]) == 2
    assert main(["evaluate", "run", "-n", "1", "--trust"]) == 0


def test_a_run_with_a_strategy_of_the_users_is_repeated_by_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--strategy", "tests.run.strategies:Alone", "--strategy.every", "2"]
    assert main(["train", "mlp", *words, "-n", "1", "--steps", "2", "--out", "run"]) == 0
    assert main(["train", "--config", "run", "--out", "again"]) == 0
    first, second = (TrainConfig.read(Path(name)) for name in ("run", "again"))
    assert (first.strategy, first.strategy_options) == (words[1], {"every": 2})
    assert second == replace(first, out=second.out)
