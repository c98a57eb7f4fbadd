"""The figure of a pipeline: every piece of work has its place in the lane of its rank."""

from __future__ import annotations

from pathlib import Path

from tests.reports.recorded import write_run
from tests.reports.recorded_comparison import PIPELINE
from tutti.records.run_folder import RunFolder
from tutti.reports.figures import FIGURES
from tutti.reports.results import read_results
from tutti.run.config import TrainConfig

CONFIG = TrainConfig(workers="2", threads=1).as_json()


def write(folder: Path) -> None:
    write_run(folder, [(1.0, 0.5)], config=CONFIG)
    RunFolder(folder).write(PIPELINE)


def test_the_lanes_have_every_piece_in_milliseconds(tmp_path: Path) -> None:
    write(tmp_path / "run")
    chart = FIGURES["pipeline"].draw(read_results([tmp_path / "run"]))
    rows = chart.to_dict()["data"]["values"]
    assert [(row["rank"], row["kind"], row["start"], row["stop"]) for row in rows] == [
        ("rank 0", "forward", 0.0, 1.0),
        ("rank 1", "forward", 1.0, 2.0),
        ("rank 1", "backward", 2.0, 4.0),
        ("rank 0", "backward", 4.0, 6.0),
    ]


def test_the_bubble_stands_below(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (said,) = FIGURES["pipeline"].says(read_results([tmp_path / "run"]))
    assert "idle for 37.5% of the ranks' time in a step (rank 0 50%, rank 1 25%)" in said
