"""The page of a comparison: what it shows, and that it needs nothing from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reports.recorded_comparison import WAYS, leave_pictures_out, write_comparison
from tutti.cli.main import main
from tutti.errors import BadRunFolder, UserError
from tutti.records.comparison import STRONG, Combination, Comparison, ComparisonFolder
from tutti.records.run import RunStart, World
from tutti.records.run_folder import RunFolder
from tutti.reports import page
from tutti.reports.figures import page_figures
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import read_comparison

DRAWN = [name for name in page_figures() if name not in ("speed-up", "within-epochs")]
"""What the recorded comparison has something to draw for."""

ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "mpi4py"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocked())
from tutti.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A program that is `tutti` on a machine with neither torch nor MPI."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_comparison(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison with its page and pictures, for tests that only look."""
    folder = tmp_path_factory.mktemp("comparison")
    write_comparison(folder)
    write(folder)
    return folder


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written with pictures of nothing: drawing them takes longer than all else."""
    leave_pictures_out(monkeypatch)


def write(folder: Path) -> str:
    return write_report(read_comparison(folder), folder / PAGE).read_text()


def test_the_page_stands_alone(written: Path) -> None:
    page = (written / PAGE).read_text()
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(src|href)=|url\(|@import", markup)
    assert markup.count("<table>") == 2
    assert markup.count("<figure ") == len(DRAWN)
    figures = json.loads(re.search(r"const figures = (\{.*?\});\nconst views", page, re.S)[1])  # type: ignore[index]
    assert sorted(figures) == sorted(DRAWN)


def test_the_page_has_the_numbers_of_the_table(written: Path) -> None:
    cells = ["sync, 2 workers", "2", "5.50", "5.00, 6.00", "367", "1.55", "", "77%", "80.00", "4.90"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in (written / PAGE).read_text()


def test_the_page_says_for_each_combination_what_to_try(written: Path) -> None:
    page = (written / PAGE).read_text()
    assert "<li>solo, 1 thread: validation takes 20% of the time: try --validation 0.025," in page
    assert "<li>sync, 2 workers: validation takes 29% of the time: try" in page


def test_the_fastest_way_is_named(written: Path) -> None:
    page = (written / PAGE).read_text()
    assert "fastest: sync, 2 workers, 1.55 times as fast as one process with one thread" in page
    assert page.count('<tr class="best"><td>sync, 2 workers</td>') == 1


def test_every_figure_is_a_picture_too(written: Path) -> None:
    assert {path.name for path in (written / "figures").iterdir()} == {
        f"{name}.{kind}" for name in DRAWN for kind in ("svg", "png")
    }
    for name in DRAWN:
        assert (written / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "sync, 2 workers" in (written / "figures" / "throughput.svg").read_text()


@pytest.mark.usefixtures("without_pictures")
def test_what_failed_is_on_the_page_and_cannot_break_it(tmp_path: Path) -> None:
    bad = Combination("easgd, 2 workers", "easgd", "easgd", 2, 1, STRONG)
    write_comparison(tmp_path, bad)
    ComparisonFolder(tmp_path).write_error(bad, 0, "ValueError: </script><b>broken</b>")
    page = write(tmp_path)
    assert "<b>broken</b>" not in page
    assert "ValueError: &lt;/script&gt;" in page
    assert '<tr class="failed"><td>easgd, 2 workers (0 of 2 runs)</td>' in page


@pytest.mark.usefixtures("without_pictures")
def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    write_comparison(tmp_path)
    asked = ComparisonFolder(tmp_path).read()
    ComparisonFolder(tmp_path).write(Comparison("<b>net</b>", asked.data, 2, None, asked.combinations))
    assert "<b>net</b>" not in write(tmp_path)


def test_without_a_finished_run_there_are_no_figures(tmp_path: Path) -> None:
    ComparisonFolder(tmp_path).write(Comparison("lenet", "mnist", 2, None, WAYS))
    page = write(tmp_path)
    assert "<figure" not in page
    assert "sync, 2 workers (0 of 2 runs)" in page


@pytest.mark.usefixtures("without_pictures")
def test_the_page_says_where_a_run_was_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(folder / "sync" / "1")
    run.note_start(RunStart("2026-01-02", World(2)))
    run.note_start(RunStart("2026-01-03T07:12:04+01:00", World(3, 2), 1234, ("<momenta>",)))
    (line,) = (line for line in write(folder).splitlines() if "changed from" in line)
    said = (
        "sync, 2 workers: on 2026-01-03 at 06:12 UTC, changed from 2 to 3 ranks of 2 hosts after step 1,234"
    )
    assert f"<li>{said}; what begins anew: &lt;momenta&gt;</li>" in line
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("without_pictures")
def test_records_that_were_cut_off_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "sync" / "1" / "history.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["report", str(folder)]) == 0
    said = f"line 2 of {path} is cut off; it was left out"
    assert f"tutti: warning: {said}" in capsys.readouterr().err
    assert said in (folder / PAGE).read_text()


def test_the_command_makes_it_without_torch_and_mpi(folder: Path) -> None:
    words = [sys.executable, "-c", ALONE, "report", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"report: {folder / PAGE}" in done.stdout
    assert (folder / PAGE).exists()


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("out", "page"), [("pages/mine.html", "pages/mine.html"), ("pages", "pages/report.html")]
)
def test_the_page_goes_where_it_is_wanted(folder: Path, out: str, page: str) -> None:
    assert main(["report", str(folder), "--out", str(folder / out)]) == 0
    assert (folder / page).exists()
    assert (folder / "pages" / "figures" / "throughput.svg").exists()
    assert not (folder / PAGE).exists()


def test_a_place_that_cannot_be_written_is_refused(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(BadRunFolder, match="name a place that you may write with --out"):
        write_report(read_comparison(folder), folder / "file" / PAGE)


def test_what_is_missing_to_draw_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"pip install 'tutti\[plots\]'"):
        write(folder)


def test_the_script_that_draws_is_kept_for_other_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def bundle() -> str:
        made.append("")
        return f"script {len(made)}"

    monkeypatch.setattr(
        page, "_converter", lambda: SimpleNamespace(__version__="7", javascript_bundle=bundle)
    )
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    script = page._library.__wrapped__
    assert [script(), script()] == ["script 1", "script 1"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["vega-7.js"]
    monkeypatch.setattr(page.os, "geteuid", lambda: 1 + (tmp_path / "cache").stat().st_uid)
    assert script() == "script 2", "another user has written what is kept"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "file"))
    assert [script(), script()] == ["script 3", "script 4"]


@pytest.mark.usefixtures("without_pictures")
def test_a_target_can_be_asked_for_afterwards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--target", "0.5"]) == 0
    assert "seconds to 50 %" in capsys.readouterr().out
    assert main(["report", str(folder), "--target", "50"]) == 2
    assert "give an accuracy above 0 and at most 1" in capsys.readouterr().err
