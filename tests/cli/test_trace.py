"""`tutti train --trace` and `--profile`: what they write, and what they refuse."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import tutti
from tutti.cli.main import main
from tutti.errors import BadOption
from tutti.launch.placement import Placement
from tutti.records.trace import Trace
from tutti.run.config import TrainConfig
from tutti.run.train_job import ProfiledSteps, TrainJob

pytestmark = pytest.mark.usefixtures("nothing_beside")

RUN = ("train", "mlp", "--data", "digits", "--batch-size", "64", "--steps", "30")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_trace_has_a_lane_for_each_rank_and_arrows_between_them(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "-n", "2", "--trace", "--out", str(out)]) == 0
    assert f"trace: {out / 'trace.json'}; open it at https://ui.perfetto.dev" in capfd.readouterr().out
    found = json.loads((out / "trace.json").read_text())
    events = found["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == ["rank 0", "rank 1"]
    assert found["otherData"]["complete"] is True
    for rank in (0, 1):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert names.count("forward") == names.count("exchange") == 30
        assert {"data", "backward", "update", "barrier", "validation"} <= set(names)
        assert {f"epoch {epoch}" for epoch in (1, 2)} <= set(names)
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert len(starts) >= 2 * 30  # two barriers a step
    assert starts == [event["id"] for event in events if event["ph"] == "f"]


def test_without_the_option_nothing_is_traced(out: Path) -> None:
    assert main([*RUN, "-n", "1", "--out", str(out)]) == 0
    assert not [path for path in out.iterdir() if path.name.startswith(("trace", "profile"))]


def test_the_profiler_looks_at_the_given_steps_of_the_given_ranks(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("--profile", "4-6", "--profile-ranks", "1")
    assert main([*RUN, "-n", "2", *asked, "--out", str(out)]) == 0
    assert "USDT" not in capfd.readouterr().err
    assert not (out / "profile-rank0.txt").exists()
    assert "aten::addmm" in (out / "profile-rank1.txt").read_text()
    events = json.loads((out / "profile-rank1.json").read_text())["traceEvents"]
    backwards = [event for event in events if event.get("name") == "aten::nll_loss_backward"]
    assert len(backwards) == 3


def test_steps_at_the_end_of_the_run_can_be_profiled(out: Path) -> None:
    assert main([*RUN, "-n", "1", "--profile", "30-30", "--out", str(out)]) == 0
    assert "aten::addmm" in (out / "profile-rank0.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--profile", "20-31"), "--profile is 20-31, but the run has 30 steps; give steps among them"),
        (("--profile", "5"), "'5' are no steps; give a first and a last one, such as 10-20"),
        (("--profile", "0-5"), "'0-5' are no steps"),
        (("--profile", "6-5"), "'6-5' are no steps"),
        (("--profile-ranks", "0"), "--profile-ranks is given without --profile"),
        (
            ("--profile", "1-2", "--profile-ranks", "0,x"),
            "--profile-ranks is '0,x'; give whole numbers with commas, such as 0,1",
        ),
        (("--profile", "1-2", "--profile-ranks", "0,1"), "names rank 1, but the job has 1 rank, counted"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_folder(
    arguments: tuple[str, ...], said: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "-n", "1", "--out", str(out), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("asked", "option"), [({"trace": True}, "--trace"), ({"profile": ProfiledSteps(1, 2)}, "--profile")]
)
def test_without_a_run_folder_there_is_nowhere_to_write(asked: dict, option: str) -> None:
    with pytest.raises(BadOption, match=f"{option} writes into the run folder, but there is none"):
        TrainJob(TrainConfig(), write=False, **asked).check(Placement(1, 1))


def test_a_trace_that_is_full_says_so(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tutti.run.recording.Trace", partial(Trace, limit=50))
    assert main([*RUN, "-n", "1", "--trace", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "tutti: warning: the trace of rank 0 is full: " in said
    assert "spans after its first 50 were left out; trace fewer steps (--steps)" in said


def test_a_trace_can_be_had_from_python(out: Path) -> None:
    tutti.train("mlp", "digits", workers=1, steps=5, quiet=True, trace=True, out=str(out))
    assert json.loads((out / "trace.json").read_text())["otherData"]["complete"] is True
    with pytest.raises(BadOption, match=r"there is none; name one with out="):
        tutti.train("mlp", "digits", workers=1, steps=5, quiet=True, trace=True)


def test_a_run_that_fails_leaves_what_rank_0_has_seen(out: Path) -> None:
    soars = ("--schedule", "StepLR", "--schedule.step-size", "25", "--schedule.gamma", "1e30")
    assert main([*RUN, "-n", "1", "--trace", *soars, "--out", str(out)]) == 2
    found = json.loads((out / "trace.json").read_text())
    assert found["otherData"]["complete"] is False
    assert "epoch 1" in [event["name"] for event in found["traceEvents"]]
