"""`tutti train --trace`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import tutti
from tutti.cli.main import main
from tutti.errors import BadOption
from tutti.records.trace import Trace

pytestmark = pytest.mark.usefixtures("nothing_beside")

RUN = ("train", "mlp", "--data", "digits", "--batch-size", "64", "--steps", "30")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_trace_has_a_lane_for_each_rank(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "-n", "2", "--trace", "--out", str(out)]) == 0
    assert f"trace: {out / 'trace.json'}; open it at https://ui.perfetto.dev" in capfd.readouterr().out
    found = json.loads((out / "trace.json").read_text())
    events = found["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == ["rank 0", "rank 1"]
    for rank in (0, 1):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert names.count("forward") == names.count("exchange") == 30
        assert {"data", "backward", "update", "barrier", "validation"} <= set(names)
        assert {f"epoch {epoch}" for epoch in (1, 2)} <= set(names)


def test_without_the_option_nothing_is_traced(out: Path) -> None:
    assert main([*RUN, "-n", "1", "--out", str(out)]) == 0
    assert not [path for path in out.iterdir() if path.name.startswith(("trace", "profile"))]


def test_a_full_trace_gives_a_warning(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tutti.run.saving.Trace", partial(Trace, limit=50))
    assert main([*RUN, "-n", "1", "--trace", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "tutti: warning: the trace of rank 0 is full: " in said
    assert "spans after its first 50 were left out; trace fewer steps (--steps)" in said


def test_python_can_write_a_trace(out: Path) -> None:
    tutti.train("mlp", "digits", workers=1, steps=5, quiet=True, trace=True, out=str(out))
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    with pytest.raises(BadOption, match=r"there is none; name one with out="):
        tutti.train("mlp", "digits", workers=1, steps=5, quiet=True, trace=True)
