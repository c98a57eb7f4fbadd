"""`tutti tune`: the same trials with or without interruptions."""

from __future__ import annotations

import csv
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.farm import killed as killed_program
from tests.preloaded import interpreter
from tutti.cli.commands import COMMANDS
from tutti.cli.main import main
from tutti.cli.options import Words
from tutti.cli.tune import train_command
from tutti.run.config import TrainConfig
from tutti.studies.score import Score
from tutti.studies.search import display as tune_page
from tutti.studies.search.trials import open_study

WORDS = [
    *("tune", "mlp", "--space.lr", "log:1e-3..1", "--space.model.hidden", "[[4],[8,4]]", "--trials", "6"),
    *("--epochs", "3", "--folds", "2", "--pruner", "asha", "--batch-size", "128"),
    # With the same threads on any number of blocks they come from one fork server.
    *("--threads", "1"),
]


def trials(folder: Path) -> list[tuple[object, ...]]:
    """Return the trials of a search."""
    study = open_study(folder, [Score("accuracy", True)])
    return [(one.number, one.params, one.state, one.values, one.intermediate_values) for one in study.trials]


def _leave_out_page(patch: pytest.MonkeyPatch) -> None:
    """A page takes seconds: one test makes it."""
    patch.setattr(tune_page, "write_tune_page", lambda found: found.folder / "report.html")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    _leave_out_page(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        _leave_out_page(patch)
        assert main([*WORDS, "--blocks", "1", "--out", str(folder)]) == 0
    return folder


@pytest.mark.usefixtures("no_page")
def test_a_search_prints_the_best_trial_and_writes_a_table(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--out", str(whole), "--resume"]) == 0
    said = capsys.readouterr().out
    command = re.search(r"^to train it alone: tutti (.*)$", said, re.MULTILINE)
    assert command is not None
    seen: list[Words] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(COMMANDS["train"], "run", lambda _, words: seen.append(words) or 0)
        assert main(shlex.split(command[1])) == 0
    rows = list(csv.DictReader((whole / "trials.csv").read_text().splitlines()))
    assert len(rows) == 6
    assert {row["state"] for row in rows} == {"complete", "pruned"}
    best = max((row for row in rows if row["state"] == "complete"), key=lambda row: float(row["accuracy"]))
    assert f"best: trial {best['trial']}, accuracy {float(best['accuracy']):.2%}" in said
    (words,) = seen
    assert str(words.given["lr"]) == best["lr"]
    assert str(words.dotted["model_options"]["hidden"]) == best["model.hidden"]
    saved = re.search(r"epochs: (\d+) of 36 trained", said)
    assert saved is not None
    histories = [path.read_text().splitlines() for path in whole.glob("jobs/*/*/history.jsonl")]
    assert int(saved[1]) == sum(map(len, histories)) < 36


def test_report_makes_the_page_from_the_folder(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(whole), "--out", str(tmp_path)]) == 0
    assert "best: trial " in capsys.readouterr().out
    assert {path.stem for path in (tmp_path / "figures").glob("*.svg")} >= {"history", "slices"}
    page = (tmp_path / "report.html").read_text()
    assert page.partition("</main>")[0].count("<tr") == 7
    assert "model.hidden" in page


@pytest.mark.usefixtures("no_page")
def test_a_killed_and_resumed_search_has_the_same_trials(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    words = ["trial-0001/fold-0 finished; ", *WORDS, "--blocks", "1", "--out", str(folder), "--resume"]
    killed = subprocess.run([*interpreter(starts_ranks=True), killed_program.__file__, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert trials(folder) != trials(whole)
    assert main([*WORDS, "--blocks", "1", "--out", str(folder), "--resume"]) == 0
    assert trials(folder) == trials(whole)


@pytest.mark.usefixtures("no_page")
def test_a_search_continues_with_more_trials_but_not_with_another_question(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*WORDS, "--space.lr", "log:1e-3..0.5", "--sampler", "random", "--out", str(whole), "--resume"]
    assert main(other) == 2
    said = capsys.readouterr().err
    assert "sampler is random (was tpe); space.lr is log:1e-3..0.5 (was log:1e-3..1)" in said
    before = trials(whole)
    assert main([*WORDS, "--trials", "7", "--out", str(whole), "--resume"]) == 0
    assert trials(whole)[:6] == before
    assert len(trials(whole)) == 7


@pytest.mark.usefixtures("no_page")
def test_failures_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "own.py"
    model.write_text(
        "from torch import nn\n"
        "def net(shape, outputs, width=1):\n"
        "    if width == 2: raise RuntimeError('too wide')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    words = ["tune", f"{model}:net", "--space.model.width", "2,1", "--sampler", "grid", "--epochs", "1"]
    words += ["--threads", "1"]
    assert main([*words, "--blocks", "2", "--out", str(tmp_path / "farm")]) == 0
    said = capsys.readouterr().out
    assert "trials: 1 complete, 1 failed\n" in said
    assert "trial 0 failed: RuntimeError: too wide" in said
    assert "best: trial 1" in said


def test_the_command_for_a_run_alone_does_not_count_servers_as_workers() -> None:
    command = train_command(TrainConfig(model="mlp", servers=1, strategy="easgd"), block=3)
    assert command == "tutti train mlp --strategy easgd -n 2 --servers 1"


@pytest.mark.usefixtures("no_page")
def test_a_search_stops_at_its_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "mlp", "--space.lr", "0.1,0.2", "--epochs", "100000", "--out", str(tmp_path / "long")]
    assert main([*words, "--time-limit", "1s", "--threads", "1"]) == 75
    assert "stopped: its time limit is over; continue" in capsys.readouterr().out
