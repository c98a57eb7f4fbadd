"""Reports of separate runs."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import escape

from tests.reports.recorded import write_run
from tests.reports.recorded_comparison import write_comparison
from tutti.cli.main import main
from tutti.records.run import Evaluation, RunStart, Summary, World
from tutti.records.run_folder import RunFolder
from tutti.reports.page import write_report
from tutti.reports.results import Results, read_comparison, read_results
from tutti.reports.scaling import Row
from tutti.reports.text import show

CONFIG: Mapping[str, object] = {
    "model": "lenet",
    "model_options": {},
    "data": "mnist",
    "data_options": {},
    "strategy": "solo",
    "workers": "1",
    "threads": 1,
    "device": "cpu",
}
SYNC = {**CONFIG, "strategy": "sync", "workers": "2"}
EPOCHS = [(4.0, 0.6), (4.0, 0.8)]
FAST = [(2.5, 0.6), (2.5, 0.8)]


def by_name(results: Results) -> dict[str, Row]:
    return {row.combination.name: row for row in results.rows}


def test_without_a_baseline_columns_are_left_out_and_the_note_says_why(tmp_path: Path) -> None:
    write_run(tmp_path / "monday", EPOCHS, config=SYNC)
    write_run(tmp_path / "tuesday", FAST, config=SYNC)
    shown = io.StringIO()
    show(read_results([tmp_path / "monday", tmp_path / "tuesday"]), shown)
    table, note = shown.getvalue().split("tuesday")[0], shown.getvalue()
    assert "samples/s" in table
    assert all(head not in table for head in ("speed-up", "vs all threads", "efficiency"))
    assert "To see speed-up and efficiency, add solo to --strategies" in " ".join(note.split())


def test_runs_are_compared_under_the_names_of_their_folders(tmp_path: Path) -> None:
    write_run(tmp_path / "monday", EPOCHS, config=CONFIG)
    write_run(tmp_path / "tuesday", FAST, config=SYNC)
    found = by_name(read_results([tmp_path / "monday", tmp_path / "tuesday"]))
    assert list(found) == ["monday", "tuesday"]
    assert (found["monday"].seconds, found["tuesday"].seconds) == (8.0, 5.0)
    assert found["tuesday"].speed_up == 8.0 / 5.0
    assert found["tuesday"].efficiency == 0.8
    assert found["tuesday"].accuracy == 0.8


def test_an_unfinished_run_is_shown_with_a_note(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", EPOCHS, config=CONFIG)
    write_run(tmp_path / "part", FAST, config=SYNC, finished=False)
    results = read_results([tmp_path / "whole", tmp_path / "part"])
    row = by_name(results)["part"]
    assert (row.seconds, row.finished, row.speed_up) == (5.0, 0, None)
    assert results.notes == [
        f"{tmp_path / 'part'} is unfinished and shown up to epoch 2; train it again, "
        f"with --checkpoint 1m or the like: tutti train --config {tmp_path / 'part'} --out ..."
    ]


def test_a_single_run_has_no_columns_of_speed_up(tmp_path: Path) -> None:
    write_run(tmp_path / "alone", EPOCHS, config=CONFIG | {"strategy": "sync"})
    shown = io.StringIO()
    show(read_results([tmp_path / "alone"]), shown)
    title, heads, *_ = shown.getvalue().splitlines()
    assert title == "lenet on mnist"
    assert heads.split("  ")[0] == "way to train"
    assert "speed-up" not in heads
    assert "efficiency" not in heads


def test_a_run_whose_ranks_changed_has_no_speed_up(tmp_path: Path) -> None:
    write_run(tmp_path / "changed", FAST, config=SYNC)
    for step, ranks in enumerate((1, 2, 2)):
        RunFolder(tmp_path / "changed").append(RunStart("2026-01-02", World(ranks, threads=2), step))
    write_run(tmp_path / "other", EPOCHS, config=CONFIG)
    results, shown = read_results([tmp_path / "changed", tmp_path / "other"]), io.StringIO()
    rows = by_name(results)
    assert rows["changed"].speed_up is rows["changed"].efficiency is None
    assert rows["other"].speed_up == 1.0
    show(results, shown)
    assert re.search(r"^changed +2-4 +5\.00 ", shown.getvalue(), re.MULTILINE)
    assert "whose number of ranks changed has no speed-up" in " ".join(shown.getvalue().split())


@pytest.mark.parametrize(
    ("best", "restored", "said"),
    [
        (2, True, "by its validation accuracy 80.00%; its weights were restored"),
        (3, False, "by its validation accuracy 70.00%; the final weights are its own"),
    ],
)
def test_a_report_names_resumptions_an_early_end_and_the_best_epoch(
    tmp_path: Path, best: int, restored: bool, said: str
) -> None:
    folder, shown = RunFolder(tmp_path / "run"), io.StringIO()
    write_run(folder.path, [*EPOCHS, (4.0, 0.7)], config=CONFIG)
    folder.append(RunStart("2026-01-02", World(2)))
    folder.append(RunStart("2026-01-03T07:12:04+01:00", World(3, 2), 1234, ("<momenta>",)))
    facts = {"best_epoch": best, "best_by": "validation accuracy", "restored": restored, "ended_early": "why"}
    folder.write(replace(folder.read(Summary), **facts))
    results = read_results([folder.path])
    show(results, shown)
    resumed, early, found = results.courses
    begun = "run: on 2026-01-03 at 06:12 UTC, changed from 2 to 3 ranks of 2 hosts after step 1,234"
    assert resumed == begun + "; what starts over: <momenta>"
    assert early == "run: ended early, after epoch 3: why"
    assert found.startswith(f"run: epoch {best} of 3 was the best, {said}")
    assert "\n".join(results.courses) in shown.getvalue()
    page = write_report(results, tmp_path / "report.html").read_text()
    assert all(f"<li>{escape(one)}</li>" in page for one in results.courses)


@pytest.mark.parametrize("changes", [{"data": "digits"}, {"model": "cnn"}, {"model_options": {"hidden": 9}}])
def test_runs_of_other_data_or_models_are_shown_with_a_warning(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    for name, own in (("a", {}), ("b", changes)):
        write_run(tmp_path / name, EPOCHS, config={**CONFIG, **own})
    found = read_results([tmp_path / "a", tmp_path / "b"])
    assert len(found.rows) == 2
    assert found.notes == [f"the runs differ in {next(iter(changes))}: their tasks are not the same"]


def test_a_folder_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no records of a run" in capsys.readouterr().err


def test_a_repeat_with_broken_records_is_left_out_with_a_note(tmp_path: Path) -> None:
    write_comparison(tmp_path)
    broken = tmp_path / "sync" / "0"
    (broken / "history.jsonl").write_text("{")
    results = read_comparison(tmp_path)
    row = by_name(results)["sync, 2 workers"]
    assert (row.finished, row.speed_up) == (1, None)
    assert any(str(broken) in note and note.endswith("it is left out") for note in results.notes)


def test_the_command_makes_a_page_of_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    test = Evaluation(20, 0.4, {"accuracy": 0.8}, [[9, 1], [3, 7]])
    write_run(tmp_path / "monday", EPOCHS, config=CONFIG, test=test)
    write_run(tmp_path / "tuesday", FAST, config=SYNC, finished=False)
    assert main(["report", "monday", "tuesday"]) == 0
    shown = capsys.readouterr()
    assert "tutti: warning: tuesday is unfinished" in shown.err
    assert "tuesday (unfinished)" in shown.out
    assert "The baseline is a run of solo on as many samples" in shown.out
    assert "shortest, longest" not in shown.out
    (page,) = (tmp_path / "reports").glob("*-lenet-mnist/report.html")
    assert "tuesday is unfinished" in page.read_text()
    assert main(["report", "monday"]) == 0
    assert (tmp_path / "monday" / "report.html").exists()
