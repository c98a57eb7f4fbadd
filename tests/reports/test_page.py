"""The page of a comparison: its content, and that it needs no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports.recorded import write_run
from tests.reports.recorded_comparison import leave_pictures_out, write_comparison
from tutti.cli.main import main
from tutti.reports.figures import page_figures
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import read_comparison

CONFIG = {"model": "mlp", "data": "digits", "strategy": "solo", "workers": "1", "threads": 1, "device": "cpu"}

DRAWN = [*page_figures()]
"""The figures of the recorded comparison."""

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
"""`tutti` on a machine without torch and MPI."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_comparison(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison with its page and pictures, which tests do not change."""
    folder = tmp_path_factory.mktemp("comparison")
    write_comparison(folder)
    write(folder)
    return folder


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pages with empty pictures: drawing takes most of the time."""
    leave_pictures_out(monkeypatch)


def write(folder: Path) -> str:
    return write_report(read_comparison(folder), folder / PAGE).read_text()


def test_the_page_needs_no_other_file(written: Path) -> None:
    page = (written / PAGE).read_text()
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(src|href)=|url\(|@import", markup)
    assert markup.count("<table>") == 2
    assert markup.count("<figure ") == len(DRAWN)
    figures = json.loads(re.search(r"const figures = (\{.*?\});\nconst views", page, re.S)[1])  # type: ignore[index]
    assert sorted(figures) == sorted(DRAWN)


def test_the_page_has_the_numbers_of_the_table(written: Path) -> None:
    cells = ["sync, 2 workers", "2", "5.50", "5.00, 6.00", "367", "1.55", "77%", "80.00", "4.90"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in (written / PAGE).read_text()


def test_every_figure_is_also_a_picture(written: Path) -> None:
    assert {path.name for path in (written / "figures").iterdir()} == {
        f"{name}.{kind}" for name in DRAWN for kind in ("svg", "png")
    }
    for name in DRAWN:
        assert (written / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "sync, 2 workers" in (written / "figures" / "speed-up.svg").read_text()


def test_the_command_needs_neither_torch_nor_mpi(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [(1.0, 0.5)], config=CONFIG)
    words = [sys.executable, "-c", ALONE, "report", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / PAGE).exists()


@pytest.mark.usefixtures("without_pictures")
def test_out_names_the_folder_of_the_page(folder: Path) -> None:
    assert main(["report", str(folder), "--out", str(folder / "pages")]) == 0
    assert (folder / "pages" / "report.html").exists()
    assert (folder / "pages" / "figures" / "speed-up.svg").exists()
    assert not (folder / PAGE).exists()


@pytest.mark.usefixtures("without_pictures")
def test_a_report_can_have_another_goal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--goal", "0.5"]) == 0
    assert "seconds to 50 %" in capsys.readouterr().out
    assert main(["report", str(folder), "--goal", "50"]) == 2
    assert "give an accuracy above 0 and at most 1" in capsys.readouterr().err
