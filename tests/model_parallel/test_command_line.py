"""`tutti train --parallel`, as a user types it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.preloaded import command
from tests.run.test_stop import TRAIN, stopped_by
from tutti.cli.main import main
from tutti.records.pipeline import BACKWARD, FORWARD, PipelineRecord
from tutti.records.run_folder import RunFolder

SMALL = ("lenet", "--data", "tests.model_parallel.runs:images", "--epochs", "1", "--batch-size", "15")


def train(folder: Path, *words: str) -> int:
    return main(["train", *SMALL, "-n", "2", "--threads", "1", "--out", str(folder), *words])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["sharded", "pipeline"])
def test_a_run_leaves_a_folder_that_evaluate_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    assert train(tmp_path / "run", "--parallel", way) == 0
    trained = capfd.readouterr().out
    assert "model lenet: 15,201 parameters" in trained
    assert json.loads((tmp_path / "run/config.json").read_text())["parallel"] == way
    (record,) = map(json.loads, (tmp_path / "run/history.jsonl").read_text().splitlines())
    assert len(record["ranks"]) == 2
    assert (tmp_path / "run/pipeline.json").exists() == (way == "pipeline")
    assert main(["evaluate", str(tmp_path / "run"), "-n", "1", "--trust"]) == 0
    figures = capfd.readouterr().out.split("23 samples")[1].strip()
    assert figures in trained


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--parallel tensor --strategy hogwild", "unlike strategy 'hogwild'; use --strategy sync"),
        ("--parallel pipeline --parallel.microbatches 16", "a pipeline gets 15 samples of a batch"),
    ],
)
def test_options_that_conflict_are_one_clear_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert train(tmp_path / "run", *words.split()) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(300)
def test_a_pipeline_records_what_each_rank_did_in_a_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--parallel", "pipeline", "--parallel.microbatches", "3", "--validation", "0")
    assert train(tmp_path / "run", *words) == 0
    record = RunFolder(tmp_path / "run").read(PipelineRecord)
    assert (record.schedule, record.microbatches) == ("1f1b", 3)
    assert [name for stage in record.layers for name in stage] == [str(number) for number in range(13)]
    done = sorted((span.rank, span.kind, span.microbatch) for span in record.spans)
    assert done == [(r, kind, at) for r in (0, 1) for kind in (BACKWARD, FORWARD) for at in range(3)]
    assert record.spans[0].start == 0
    assert all(span.start < span.stop for span in record.spans)
    assert all(0 < idle < 1 for idle in record.idle)
    assert "pipeline 1f1b, 3 microbatches: idle for" in capfd.readouterr().out


@pytest.mark.timeout(300)
def test_a_stopped_run_resumes_in_its_layout_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    way = ["-n", "2", "--parallel", "pipeline", "--parallel.schedule", "gpipe"]
    assert "saving, then stopping" in stopped_by(signal.SIGUSR1, [*command(), *TRAIN, *way], run)
    assert main(["train", "--resume", str(run), "--parallel", "tensor"]) == 2
    assert "cannot be resumed with --parallel tensor (was pipeline)" in capfd.readouterr().err
    # A rule that ends the run with the epoch in which it was stopped.
    end = ("--monitor", "train_loss", "--goal", "1000", "--restore-best")
    assert main(["train", "--resume", str(run), *end]) == 0
    said = capfd.readouterr().out
    assert re.search(r"resumed after step [\d,]+ on 2 ranks\n", said)
    assert "ended early: training loss" in said
