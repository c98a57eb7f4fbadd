"""What the commands that measure print and write, on a GPU and on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tutti.cli.main import main
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
    measured = [one for one in found["candidates"] if one["samples_per_s"]]
    assert found["pick"]["ranks"] == 1
    assert any({**one, **found["pick"]} == one for one in measured)


@DEVICES
def test_verify_and_compare_know_the_device(
    device: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(f"verify mlp -n 1 --device {device} --steps 5".split()) == 0
    assert "verdict: parallel training follows sequential training" in capfd.readouterr().out
    devices = ["cpu"] if device == "cpu" else ["cpu", device]
    words = f"compare mlp --devices {','.join(devices)} --strategies solo --repeats 1 --epochs 3 --out found"
    assert main(words.split()) == 0
    results = read_results([folder / "found"])
    assert {row.combination.device for row in results.rows} == set(devices)
    learned = [row.accuracy for row in results.rows]
    assert min(learned) > 0.6
    assert learned == pytest.approx([learned[0]] * len(learned), abs=0.05)
