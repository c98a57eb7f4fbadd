"""The run to resume, and the options that may differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadCheckpoint, BadOption, BadRunFolder
from tutti.records.checkpoints import FOLDER, LATEST, MANIFEST, step_folder
from tutti.records.run import EpochRecord, Evaluation, RunStart, Summary, World
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run.config import TrainConfig
from tutti.run.restore import found_by
from tutti.run.resume import MAY_DIFFER, Resume, going_on, way_on

FOUND = Evaluation(50, 0.5, {"accuracy": 0.875})
CONFIG = TrainConfig(model="mlp", data="digits", lr=0.01)


def left_by(folder: Path, *steps: int, finished: bool = False) -> Path:
    """A run folder with what looks like checkpoints, until somebody verifies them."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    run.write_config(CONFIG.as_json())
    for step in steps:
        place = step_folder(folder / FOLDER, step)
        place.mkdir(parents=True)
        (place / MANIFEST).write_text("{}")
        (folder / FOLDER / LATEST).unlink(missing_ok=True)
        (folder / FOLDER / LATEST).symlink_to(place.name)
    if finished:
        run.append(EpochRecord(1, 5, True, FOUND, FOUND, {"total": 1.0, "validation": 0.1}, 1.0, 0.1, "now"))
        run.write(Summary.of(run.lines(EpochRecord).records, FOUND, 10, World()))
        run.append(RunStart("now"))
        run.write(TrainedOn("digits", 10, (), (1, 8, 8), (), ()))
    return folder


def test_a_run_is_found_by_its_folder(tmp_path: Path) -> None:
    run = left_by(tmp_path / "run", 5, 10)
    for where, out in ((run, None), (run, str(run)), (run, f"{run}/")):
        found = Resume.find(str(where), out)
        assert found == Resume(run)
        assert found.goes_on


@pytest.mark.parametrize("name", ["step-00000005", LATEST])
def test_a_run_is_found_by_one_of_its_checkpoints(tmp_path: Path, name: str) -> None:
    run = left_by(tmp_path / "run", 5, 10)
    found = Resume.find(str(run / FOLDER / name), None)
    assert found == Resume(run, step_folder(run / FOLDER, 5 if name != LATEST else 10))


def test_the_command_to_resume_is_quoted() -> None:
    assert way_on("runs/lenet", (), TrainConfig()) == "tutti train --resume runs/lenet"
    assert way_on(Path("my runs/$net"), (), TrainConfig()) == "tutti train --resume 'my runs/$net'"
    code = TrainConfig(model="my.py:make")
    assert way_on("runs/own", (), code) == "tutti train --resume runs/own --trust"
    assert (
        way_on("my runs", ["model"], TrainConfig()) == "the same call of tutti.train, with resume='my runs'"
    )


def test_auto_resumes_or_begins(tmp_path: Path) -> None:
    assert Resume.find("auto", str(tmp_path / "fresh")) is None
    (tmp_path / "empty").mkdir()
    assert Resume.find("auto", str(tmp_path / "empty")) is None
    killed = Resume.find("auto", str(left_by(tmp_path / "killed")))
    assert killed is not None
    assert not killed.goes_on
    for folder in (left_by(tmp_path / "run", 5), left_by(tmp_path / "finished", finished=True)):
        found = Resume.find("auto", str(folder))
        assert found == Resume(folder, auto=True)
        assert found.goes_on


def test_runs_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    run = left_by(tmp_path / "run", 5)
    (tmp_path / "file").write_text("")
    (tmp_path / "strange").mkdir()
    for where, out, kind, said in (
        ("auto", None, BadOption, "name that folder too"),
        (run, tmp_path / "other", BadOption, "leave --out out"),
        (run / FOLDER / "step-00000005", run / FOLDER, BadOption, "leave --out out"),
        (tmp_path / "none", None, BadRunFolder, "does not exist"),
        (tmp_path / "file", None, BadRunFolder, "is a file"),
        (tmp_path / "strange", None, BadRunFolder, "no folder of a run"),
        (left_by(tmp_path / "killed"), None, BadRunFolder, "has no checkpoint to resume"),
    ):
        with pytest.raises(kind, match=said):
            Resume.find(str(where), None if out is None else str(out))


def test_a_resumed_run_must_learn_the_same() -> None:
    now = replace(CONFIG, model="cnn", batch_size=7, schedule="one_cycle", workers="3", epochs=9, keep=1)
    with pytest.raises(BadOption) as error:
        going_on(CONFIG, now)
    for part in (
        "cnn (was mlp)",
        f"7 (was {CONFIG.batch_size})",
        "one_cycle (was none)",
        "leave out what differs",
    ):
        assert part in str(error.value)
    assert "--workers" not in str(error.value)
    with pytest.raises(BadOption, match="give as at first what differs, or begin a new run"):
        going_on(replace(CONFIG, model="object:Net"), replace(CONFIG, model="cnn"))


@pytest.mark.parametrize("stream", [True, False])
def test_automatic_streaming_is_decided_as_before(stream: bool) -> None:
    before = replace(CONFIG, data_options={"stream": stream, "buffer": 8})
    assert going_on(before, replace(CONFIG, data_options={"stream": "auto", "buffer": 8})) == before
    with pytest.raises(BadOption, match=r"--data\.stream"):
        going_on(before, replace(CONFIG, data_options={"stream": not stream, "buffer": 8}))


def test_options_of_the_machine_and_of_the_end_may_differ() -> None:
    fields = TrainConfig.__dataclass_fields__
    assert set(fields) >= MAY_DIFFER
    assert {"seed", "data", "optimizer", "lr", "batch_size"}.isdisjoint(MAY_DIFFER)
    going_on(CONFIG, replace(CONFIG, workers="2", precision="fp64", strategy="local", epochs=3, out="x"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--checkpoint", "0 steps"], "give at least '1 step'"),
        (["cnn"], "--model cnn (was mlp)"),
        (["--batch-size", "7", "--seed", "5"], "--batch-size 7 (was"),
        (["--model.hidden", "50"], "--model.hidden 50 (was none)"),
        (["--config", "config.json"], "leave --config out"),
    ],
)
def test_a_run_is_not_resumed_with_wrong_options(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left_by(tmp_path / "run", 5)
    before = sorted(run.rglob("*"))
    assert main(["train", "--resume", str(run), *options]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert sorted(run.rglob("*")) == before


def test_a_finished_run_prints_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = left_by(tmp_path / "run", 5, finished=True)
    for options in (["--resume", str(run)], ["--resume", "auto", "--out", str(run)]):
        assert main(["train", *options]) == 0
        shown = capsys.readouterr().out
        assert "has come to its end; give more epochs to train on" in shown
        assert "test: 50 samples, accuracy 87.50%" in shown
        assert "trained 5 steps" in shown


def test_a_finished_run_without_checkpoints_keeps_its_weights_only(tmp_path: Path) -> None:
    run = left_by(tmp_path / "run", finished=True)
    with pytest.raises(BadCheckpoint, match=r"its weights only.* --weights RUN, or train with --checkpoint"):
        VirtualWorld(1).run(lambda comm: found_by(comm, Resume(run)))
