"""The list of runs: what it says of each, and what damage does to it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from tests.reports.recorded import write_run
from tutti.cli.main import main
from tutti.errors import BadRunFolder
from tutti.records.run import Evaluation
from tutti.terminal import console_on
from tutti.watching.listing import DAMAGED, list_runs, table_of

CONFIG = {"model": "lenet", "data": "mnist", "strategy": "sync", "workers": "2"}
TEST = Evaluation(100, 0.1, {"accuracy": 0.9876, "f1": 0.5})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, an unfinished one that is older, and one of a comparison that is older still."""
    runs = tmp_path / "runs"
    write_run(runs / "first", [(10, 0.5), (10, 0.75)], test=TEST, config=CONFIG)
    write_run(runs / "second", [(10, 0.5)], finished=False, config={**CONFIG, "model": "/nets/mine.py:net"})
    write_run(runs / "both" / "sync" / "0", [(10, None)], config=CONFIG)
    for age, name in enumerate(("first", "second", "both/sync/0")):
        for path in ((runs / name), *(runs / name).iterdir()):
            os.utime(path, (1.7e9 - 3600 * age, 1.7e9 - 3600 * age))
    summary = runs / "both" / "sync" / "0" / "summary.json"
    summary.write_text(summary.read_text().replace('"date": "20', '"date": "19'))
    return runs


def test_each_run_is_listed_with_what_came_out(folder: Path) -> None:
    found = {Path(run.folder).name: run for run in list_runs(folder)}
    first, second = found["first"], found["second"]
    assert (first.model, first.data, first.strategy, first.ranks) == ("lenet", "mnist", "sync", 2)
    assert (first.state, first.test, first.seconds, first.epochs) == ("finished", TEST.metrics, 30, 2)
    assert first.validation == {"accuracy": 0.75}
    assert (second.state, second.test, second.epochs) == ("failed", {}, 1)
    assert second.validation == {"accuracy": 0.5}


def test_the_newest_comes_first_and_those_of_comparisons_are_there(folder: Path) -> None:
    names = [Path(run.folder).name for run in list_runs(folder)]
    assert names == ["first", "second", "0"]
    assert [Path(run.folder).name for run in list_runs(folder, newest=1)] == ["first"]


@pytest.mark.parametrize("where", [".", "farms", "farms/first"])
def test_those_of_farms_are_there_however_deep_their_names_are(tmp_path: Path, where: str) -> None:
    farm = tmp_path / "farms" / "first"
    write_run(farm / "jobs" / "lenet" / "cosine" / "lr=0.01" / "fold-0", [(10, 0.5)], config=CONFIG)
    (farm / "farm.json").write_text("{}")
    assert [Path(run.folder).name for run in list_runs(tmp_path / where)] == ["fold-0"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("history.jsonl", None),
        ("summary.json", '{"seconds": []}'),
    ],
)
def test_a_damaged_run_is_listed_among_the_others(folder: Path, name: str, content: str | None) -> None:
    path = folder / "first" / name
    path.unlink()
    path.mkdir() if content is None else path.write_text(content)
    found = {Path(run.folder).name: run for run in list_runs(folder)}
    assert found["first"].state in (DAMAGED, "failed")
    assert len(found) == 3


def test_what_a_terminal_would_obey_is_written_out(folder: Path) -> None:
    hostile = {**CONFIG, "model": "\x1b[2Jnet", "strategy": ["\x1b[2J"], "workers": "\x1b[2J"}
    (folder / "first" / "config.json").write_text(json.dumps(hostile))
    stream = io.StringIO()
    console_on(stream).print(table_of(list_runs(folder)))
    assert "\x1b" not in stream.getvalue()
    assert "[2Jnet" in stream.getvalue()


def test_a_pipe_gets_plain_lines_and_json_has_all_metrics(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(folder)]) == 0
    heads, first, *_ = capsys.readouterr().out.splitlines()
    assert heads.split()[:5] == ["run", "model", "data", "strategy", "ranks"]
    assert first.split()[1:10] == ["lenet", "mnist", "sync", "2", "finished", "2", "98.76", "75.00", "0:30"]
    assert main(["runs", str(folder), "--json", "--newest", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["test"] == TEST.metrics


def test_without_runs_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "no runs: there is no folder runs here" in capsys.readouterr().err
    assert main(["runs", "nowhere"]) == 2
    with pytest.raises(BadRunFolder, match="is a file"):
        list_runs(Path(__file__))
