"""The programs and commands of the lessons run on small data, and give what the pages say of any machine."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.programs import blocks_of
from tests.preloaded import interpreter
from tutti.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytest.importorskip("altair")
pytestmark = pytest.mark.timeout(400)


def lesson(folder: Path, name: str, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what a program prints, and the rows of the chart that it draws."""
    program = [*interpreter(starts_ranks=True), str(EXAMPLES / name), *words, "--out", "chart.json"]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    return done.stdout, rows_of(json.loads((folder / "chart.json").read_text()))


def rows_of(chart: object) -> list[dict[str, Any]]:
    """Return all rows of data in a chart."""
    if isinstance(chart, list):
        return [row for one in chart for row in rows_of(one)]
    if not isinstance(chart, dict):
        return []
    data = chart.get("data")
    own = data["values"] if isinstance(data, dict) and "values" in data else []
    return own + [row for key, value in chart.items() if key != "data" for row in rows_of(value)]


def test_ring_tree_and_server_cost_what_the_formulas_say_and_each_wins_somewhere(tmp_path: Path) -> None:
    _, rows = lesson(tmp_path, "ring_tree_server.py", "--ranks", "2,8,16")
    assert len(rows) == 27
    assert all(row["us"] == pytest.approx(row["formula"], rel=2e-3) for row in rows)
    costs = {(row["way"], row["size"], row["ranks"]): row["us"] for row in rows}
    fastest = {
        place: min(("ring", "tree", "server"), key=lambda way: costs[way, *place])
        for place in [("4 KiB", 8), ("64 KiB", 16), ("1 MiB", 16)]
    }
    assert list(fastest.values()) == ["server", "tree", "ring"]


def test_synchronous_training_has_one_accuracy_by_any_algorithm_and_asynchronous_another(
    tmp_path: Path,
) -> None:
    _, rows = lesson(tmp_path, "accuracy_and_scale.py", "--workers", "4", "--epochs", "1")
    at_4 = {row["way"]: row for row in rows if row["workers"] == 4}
    synchronous = [row["accuracy"] for way, row in at_4.items() if way.startswith("synchronous")]
    assert len(synchronous) == 3
    assert set(synchronous) == {synchronous[0]}
    assert at_4["asynchronous, server"]["accuracy"] != synchronous[0]
    assert all(3 < row["speed-up"] < 4 for row in at_4.values())


def test_weights_split_by_hand_end_as_those_of_the_undivided_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-n", "2", str(EXAMPLES / "split_weights.py")]) == 0
    said = capfd.readouterr().out
    assert said.count("rank 0 of 2 has 3,755 of 7,510 parameters") == 2
    differences = [float(found) for found in re.findall(r"outputs differ by (\S+)", said)]
    assert len(differences) == 2
    assert max(differences) < 1e-12


def test_the_classroom_network_is_the_same_in_every_way_and_each_way_has_its_stages(tmp_path: Path) -> None:
    said, rows = lesson(tmp_path, "classroom.py", "--data", "digits", "--epochs", "1")
    ways = dict.fromkeys(row["way"] for row in rows)
    assert {"sequential", "2 processes", "split weights"} <= set(ways)
    stages = ["extract", "transform", "load", "start", "train", "evaluate"]
    assert [row["stage"] for row in rows] == len(ways) * stages
    assert min(row["seconds"] for row in rows) > 0
    assert said.count("skipped: ") == 5 - len(ways)
    differences = [float(found) for found in re.findall(r"(\S+e[-+]\d+)$", said, re.MULTILINE)]
    assert len(differences) == len(ways)
    assert max(differences) < 1e-3


def test_hogwild_and_folds_show_the_cores_and_the_accuracy_of_each_class(tmp_path: Path) -> None:
    words = ["--data", "digits", "--epochs", "1", "--folds", "2", "--workers", "2"]
    _, rows = lesson(tmp_path, "hogwild_and_folds.py", *words)
    found = {row["way"]: row for row in rows if "busy" in row}
    assert [*found] == [
        "1 worker",
        "sync, 2 workers",
        "hogwild, 2 workers",
        "2 folds, 1 at a time",
        "2 folds, 2 at a time",
    ]
    assert all(len(row["classes"]) == 10 and row["busy"] > 0 for row in found.values())
    assert found["1 worker"]["classes"] == found["sync, 2 workers"]["classes"]
    assert found["2 folds, 1 at a time"]["classes"] == found["2 folds, 2 at a time"]["classes"]


def test_masters_workers_and_blocks_train_on_lists_of_files(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("optuna")
    said, rows = lesson(tmp_path, "physicist.py", "--epochs", "1", "--jets", "1000", "--trials", "2")
    assert len({row["way"] for row in rows if "way" in row}) == 4
    assert [row["state"] for row in rows if "trial" in row] == ["complete", "complete"]
    assert "best of 2 trials" in said


@pytest.mark.mpi
def test_efficiencies_come_from_the_seconds_in_their_rows(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = ["--model", "mlp", "--data", "digits", "--steps", "20", "--processes", "1,2", "--repeats", "1"]
    said, rows = lesson(tmp_path, "efficiency.py", *words)
    bars = {(row["way"], row["baseline"]): row["times"] for row in rows if "way" in row}
    assert len(bars) == 8
    assert bars["1 thread", "over 1 thread"] == 1
    ratios = {way: bars[way, "over all threads"] / bars[way, "over 1 thread"] for way, _ in bars}
    assert len({round(ratio, 9) for ratio in ratios.values()}) == 1
    assert "MPI, 2 processes" in said


def test_the_simulations_about_renting_run_and_say_where_sync_stops_paying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block.code for block in blocks_of("lessons/rent.md")]
    (machine,) = [code for code in blocks if code.startswith("name = ")]
    Path("mine.toml").write_text(machine)
    simulations = re.findall(r"^tutti (simulate .*)$", "".join(blocks).replace("\\\n", ""), re.MULTILINE)
    assert len(simulations) == 3
    for words in map(shlex.split, simulations):
        assert main([*words, "--data", "digits", "--epochs", "1", "--workers", "2,4"]) == 0
        printed = capfd.readouterr().out
        assert "--timing" not in words or "sync stops paying at 4 workers" in printed
    assert Path("rent.svg").exists()
