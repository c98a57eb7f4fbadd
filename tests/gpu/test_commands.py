"""What the commands that measure print and write, on a GPU and on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tutti.cli.main import main
from tutti.records.comparison import FILE
from tutti.reports.results import read_results

DEVICES = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
            ],
        ),
    ],
)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command writes what nobody has named a place for."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@DEVICES
def test_a_plan_measures_the_device_and_names_it_in_its_command(
    device: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"plan mlp -n 1 --threads 1 --device {device} --precision fp32 --budget 5 --json plan.json"
    assert main(words.split()) == 0
    found = json.loads((folder / "plan.json").read_text())
    assert capfd.readouterr().out.splitlines()[-1] == found["command"]
    assert ("--device cuda" in found["command"]) == (device == "cuda")
    measured = [one for one in found["candidates"] if one["problem"] is None and one["samples_per_s"]]
    assert found["pick"]["ranks"] == 1
    assert any({**one, **found["pick"]} == one for one in measured)


@DEVICES
def test_verify_finds_a_deviation_that_is_no_more_than_rounding(
    device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(f"verify mlp -n 1 --device {device} --steps 5".split()) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "verdict: parallel training follows sequential training"
    for quantity in ("loss", "gradient", "weights"):
        (row,) = [line.split() for line in lines if line.startswith(f"{quantity} ")]
        assert float(row[1]) <= float(row[3])


@DEVICES
def test_a_comparison_has_a_row_for_each_device_with_its_seconds_and_its_accuracy(
    device: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    devices = ["cpu"] if device == "cpu" else ["cpu", device]
    words = f"compare mlp --devices {','.join(devices)} --strategies solo --repeats 1 --epochs 3 --out found"
    assert main(words.split()) == 0
    assert (folder / "found" / FILE).is_file()
    results = read_results([folder / "found"], force=False)
    assert {row.combination.device for row in results.rows} == set(devices)
    printed = capfd.readouterr().out.splitlines()
    for row in results.rows:
        assert row.error is None
        assert row.finished == 1
        assert row.seconds is not None
        assert row.accuracy is not None
        assert row.accuracy > 0.6
        (line,) = [line for line in printed if line.startswith(f"{row.combination.name}  ")]
        assert f"{row.seconds:.2f}" in line
        assert f"{100 * row.accuracy:.2f}" in line
    learned = [row.accuracy for row in results.rows]
    assert learned == pytest.approx([learned[0]] * len(learned), abs=0.05)
    assert re.search(r"^report: found/", "\n".join(printed), re.M)
    assert (folder / "found" / "report.html").is_file()
