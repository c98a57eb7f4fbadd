"""The folder that a run writes, and what can be wrong with it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tutti.errors import BadModel, BadRunFolder
from tutti.records import run_folder
from tutti.records.folder_lock import FolderLock
from tutti.records.pipeline import FORWARD, PipelineRecord, PipelineSpan
from tutti.records.run import EpochRecord, Evaluation, Summary, World
from tutti.records.run_folder import RunFolder, TrainedOn, check_writable
from tutti.replica import Replica
from tutti.run.trained_run import find_run
from tutti.training.weights import load_weights, weights_to_bytes

RECORD = EpochRecord(
    1, 8, True, Evaluation(10, 0.5), None, {"validation": 0.0, "total": 1.0}, 10.0, 0.1, "now"
)
PIPELINE = PipelineRecord("gpipe", 1, [["0"]], [0.5], [PipelineSpan(0, FORWARD, 0, 0.0, 0.001)])
TRAINED_ON = TrainedOn("digits", 3, ("a", "b", "c"), (1, 8, 8), (0.3,), (0.2,))


class Tied(nn.Module):
    """Tied weights, a frozen parameter, buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0), requires_grad=False)
        self.register_buffer("mask", torch.rand(2) > 0.5)
        self.register_buffer("passing", torch.rand(2), persistent=False)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "run", "mlp", "digits")
    module = nn.Linear(4, 3)
    folder.write_config({"model": "mlp", "lr": None})
    for record in (TRAINED_ON, PIPELINE):
        folder.write(record)
    folder.append(RECORD)
    summary = Summary.of([RECORD], RECORD.train, 15, World())
    folder.write_file(run_folder.WEIGHTS, weights_to_bytes(module.state_dict()))
    folder.write(summary)
    again, other = RunFolder.open(folder.path), nn.Linear(4, 3)
    load_weights(other, again.weights)
    assert json.loads((again.path / run_folder.CONFIG).read_text()) == {"model": "mlp", "lr": None}
    assert again.read(TrainedOn) == TRAINED_ON
    assert again.find(PipelineRecord) == PIPELINE
    assert again.lines(EpochRecord).records == [RECORD]
    assert again.read(Summary) == summary
    assert torch.equal(module.weight, other.weight)
    files = {run_folder.CONFIG, run_folder.HISTORY, run_folder.WEIGHTS}
    assert {path.name for path in folder.path.iterdir()} == {*files, *run_folder.RECORDS.values(), "ranks"}


def test_weights_of_a_replica_keep_everything_and_stay_views(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "mlp", "digits")
    module, other = Tied(), Tied()
    Replica(module)
    replica = Replica(other)
    folder.write_file(run_folder.WEIGHTS, weights_to_bytes(module.state_dict()))
    load_weights(other, folder.weights)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert other.second.weight is other.first.weight
    weights, span = replica.flats[0].weights, replica.flats[0].spans[0]
    assert torch.equal(weights[span], module.first.weight.detach().flatten())


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "mlp", "digits")
    module = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    module[1].weight = module[0].weight
    folder.write_file(run_folder.WEIGHTS, weights_to_bytes(module.state_dict()))
    assert (folder.path / run_folder.WEIGHTS).stat().st_size < 1.5 * 200 * 200 * 4


def test_the_default_name_tells_date_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "folder_name", lambda model, data: f"today-{model}-{data}")
    first, second = (RunFolder.create(None, "mlp", "digits").path for _ in range(2))
    assert str(first) == "runs/today-mlp-digits"
    assert str(second) == "runs/today-mlp-digits-2"


def test_a_folder_with_something_in_it_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for attempt in (lambda: check_writable(tmp_path), lambda: RunFolder.create(tmp_path, "mlp", "digits")):
        with pytest.raises(BadRunFolder, match="not empty; name another one with --out"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_an_error_with_a_remedy_and_keeps_the_old_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"old": true}')
    for write in (lambda: folder.write_config({}), lambda: folder.append(RECORD)):
        with pytest.raises(BadRunFolder, match="No space left on device; free some space"):
            write()
    assert json.loads((folder.path / run_folder.CONFIG).read_text()) == {"old": True}
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


def test_a_folder_without_final_weights_says_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match=r"has no config\.json, so it is no folder of a run"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")

    def refused() -> str:
        with pytest.raises(BadRunFolder) as error:
            find_run(tmp_path)
        return str(error.value).replace(str(tmp_path), "RUN")

    assert "was interrupted, with 0 complete epochs and no checkpoint" in refused()
    assert refused().endswith("tutti train --config RUN --out ...")
    RunFolder(tmp_path).append(RECORD)
    (tmp_path / "checkpoints" / "step-00000012").mkdir(parents=True)
    folder = RunFolder.open(tmp_path)
    assert "with 1 complete epochs and a checkpoint" in folder.unfinished
    assert folder.next_step == f"finish it: tutti train --resume {tmp_path}"
    with FolderLock(tmp_path):
        assert "is being trained" in folder.unfinished


@pytest.mark.parametrize("content", ["{", "[]", '{"test": 3}', '{"name": "digits", "classes": "x"}', "{}"])
def test_broken_json_is_named(tmp_path: Path, content: str) -> None:
    for name in ("summary.json", "data.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(BadRunFolder, match=r"summary\.json"):
        RunFolder(tmp_path).read(Summary)
    with pytest.raises(BadRunFolder, match=r"data\.json"):
        RunFolder(tmp_path).read(TrainedOn)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_file(run_folder.WEIGHTS, weights_to_bytes(nn.Linear(4, 3).state_dict()))
    path = tmp_path / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadRunFolder, match=r"cannot read the weights in .*weights\.safetensors"):
        load_weights(nn.Linear(4, 3), folder.weights)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_file(run_folder.WEIGHTS, weights_to_bytes(nn.Linear(4, 3).state_dict()))
    with pytest.raises(BadModel, match=r"(?s)another model.*size mismatch for weight"):
        load_weights(nn.Linear(4, 2), folder.weights)
    with pytest.raises(BadModel, match=r'(?s)Missing key.*"0\.weight"'):
        load_weights(nn.Sequential(nn.Linear(4, 3)), folder.weights)
    with pytest.raises(BadModel, match=r"(?s)another model.*bias"):
        load_weights(nn.Linear(4, 3, bias=False), folder.weights)


def test_reading_a_run_folder_needs_no_torch() -> None:
    program = "import sys, tutti.records.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
