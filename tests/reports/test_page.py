"""The page of a comparison: what it shows, and that it needs nothing from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from reports.recorded import write_run
from tutti.cli.main import main
from tutti.comparisons import STRONG, WEAK, Combination, Comparison, error_file, run_folder
from tutti.errors import UserError
from tutti.records import Evaluation
from tutti.reports.figures import FIGURES, Results
from tutti.reports.page import write_report
from tutti.reports.scaling import finished_runs, rows

WAYS = (
    Combination("solo, 1 thread", "one", "solo", 1, 1, STRONG),
    Combination("sync, 2 workers", "sync", "sync", 2, 1, STRONG),
    Combination("solo, 1 thread, weak", "weak-one", "solo", 1, 1, WEAK),
    Combination("sync, 2 workers, weak", "weak-sync", "sync", 2, 1, WEAK),
)


TEST = Evaluation(20, 0.4, {"accuracy": 0.8}, [[9, 1], [3, 7]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for one, seconds in zip(WAYS, (4.0, 2.5, 4.0, 2.0), strict=True):
        for repeat in range(2):
            rank = {"data": 0.5, "forward": 1.0, "backward": seconds - 1.75, "wait": 0.25, "validation": 1.0}
            path, stages = run_folder(tmp_path, one, repeat), [rank] * one.workers
            write_run(path, [(seconds, 0.5), (seconds, 0.75)], validation_s=1.0, stages=stages, test=TEST)
    Comparison("lenet", "mnist", 2, 0.7, WAYS).write(tmp_path)
    return tmp_path


def results(folder: Path) -> Results:
    comparison = Comparison.read(folder)
    runs = {one.folder: finished_runs(comparison, folder, one) for one in comparison.combinations}
    return Results(comparison, rows(comparison, folder), runs)


def values(folder: Path, figure: str) -> list[dict[str, object]]:
    """The rows of the largest table behind a figure."""
    chart = FIGURES[figure][1](results(folder))
    assert chart is not None
    tables: list[list[dict[str, object]]] = []

    def collect(node: object) -> None:
        if isinstance(node, dict):
            data = node.get("data")
            if isinstance(data, dict) and isinstance(data.get("values"), list):
                tables.append(data["values"])
            for item in node.values():
                collect(item)
        elif isinstance(node, list):
            for item in node:
                collect(item)

    collect(chart.to_dict())
    return max(tables, key=lambda table: (len(table[0]), len(table)))


def test_learning_is_drawn_against_the_time_of_training(folder: Path) -> None:
    found = [row for row in values(folder, "progress") if row["way"] == "sync, 2 workers"]
    assert {(row["epoch"], row["seconds"], row["accuracy"], row["loss"]) for row in found} == {
        (1, 2.5, 0.5, 0.5),
        (2, 5.0, 0.75, 0.25),
    }


def test_the_speed_up_is_that_of_the_table(folder: Path) -> None:
    found = {(row["name"], row["scaling"]): row for row in values(folder, "speed-up")}
    assert found["sync, 2 workers", "strong scaling"]["speed-up"] == 8.0 / 5.0
    assert found["sync, 2 workers, weak", "weak scaling"]["speed-up"] == 8.0 / 4.0
    assert found["sync, 2 workers, weak", "weak scaling"]["efficiency"] == 1.0


def test_the_stages_add_up_over_ranks_and_epochs(folder: Path) -> None:
    found = [row for row in values(folder, "stages") if row["way"] == "sync, 2 workers"]
    assert {row["stage"]: row["seconds"] for row in found} == {
        "data": 2.0,
        "forward": 4.0,
        "backward": 3.0,
        "wait": 1.0,
        "validation": 4.0,
    }


def test_the_accuracy_of_each_class_is_its_share_that_was_right(folder: Path) -> None:
    found = [row for row in values(folder, "classes") if row["way"] == "solo, 1 thread"]
    assert [(row["class"], row["accuracy"]) for row in found] == [(0, 0.9), (1, 0.7)]


def test_the_page_stands_alone(folder: Path) -> None:
    page = write_report(Comparison.read(folder), folder).read_text()
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(src|href)=|url\(|@import", markup)
    assert markup.count("<table>") == 2
    assert markup.count("<figure>") == len(FIGURES)
    figures = json.loads(re.search(r"const figures = (\{.*?\});\nconst dark", page, re.S)[1])  # type: ignore[index]
    assert list(figures) == list(FIGURES)
    assert (
        "<td>sync, 2 workers</td><td>2</td><td>5.00</td><td>5.00, 5.00</td><td>400</td><td>1.60</td>" in page
    )


def test_the_page_says_for_each_combination_what_to_try(folder: Path) -> None:
    page = write_report(Comparison.read(folder), folder).read_text()
    assert page.count("<li>") == len(WAYS)
    assert "<li>solo, 1 thread: validation takes 20% of the time: try --validation 0.025," in page
    assert "<li>sync, 2 workers: validation takes 29% of the time: try" in page


def test_every_figure_is_a_picture_too(folder: Path) -> None:
    write_report(Comparison.read(folder), folder)
    for name in FIGURES:
        svg = (folder / "figures" / f"{name}.svg").read_text()
        assert svg.startswith("<svg")
        assert "sync, 2 workers" in svg or name == "speed-up"
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_what_failed_is_on_the_page_and_cannot_break_it(folder: Path) -> None:
    bad = Combination("easgd, 2 workers", "easgd", "easgd", 2, 1, STRONG)
    error_file(folder, bad, 0).parent.mkdir()
    error_file(folder, bad, 0).write_text("ValueError: </script><b>broken</b>")
    comparison = Comparison("lenet", "mnist", 2, None, (*WAYS, bad))
    page = write_report(comparison, folder).read_text()
    assert "<b>broken</b>" not in page
    assert "ValueError: &lt;/script&gt;" in page
    assert '<tr class="failed"><td>easgd, 2 workers (0 of 2 runs)</td>' in page


def test_without_a_finished_run_there_are_no_figures(tmp_path: Path) -> None:
    page = write_report(Comparison("lenet", "mnist", 2, None, WAYS), tmp_path).read_text()
    assert "<figcaption>" not in page
    assert "sync, 2 workers (0 of 2 runs)" in page


def test_the_command_makes_it_without_torch_and_mpi(folder: Path) -> None:
    program = (
        "import sys; from tutti.cli.main import main; code = main(['report', sys.argv[1]]); "
        "assert not {'torch', 'mpi4py'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"report: {folder / 'report.html'}" in done.stdout
    assert (folder / "report.html").exists()


def test_what_is_missing_to_draw_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"pip install 'tutti\[plots\]'"):
        write_report(Comparison.read(folder), folder)


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "give the folder that 'tutti compare' wrote" in capsys.readouterr().err


def test_a_comparison_keeps_all_that_the_report_needs(folder: Path) -> None:
    assert [asdict(one) for one in Comparison.read(folder).combinations] == [asdict(one) for one in WAYS]
