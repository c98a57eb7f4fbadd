"""The tutorial: a reader who does what it says gets what it shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.docs.programs import blocks_of, follow
from tutti.launch import world
from tutti.own_loop import distribute


def without_numbers(text: str) -> str:
    return re.sub(r"[\d.,]+(?:e-\d+)?", "#", text)


@pytest.mark.timeout(300)
def test_a_reader_of_the_tutorial_gets_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Another test may have closed the communicator of a loop of its own.
    monkeypatch.setattr(distribute, "_loop", None)
    monkeypatch.setattr(world, "_world", None)
    blocks = blocks_of("tutorial.md")
    assert sum(block.language == "bash" for block in blocks) >= 6
    follow(blocks, {})
    printed = capfd.readouterr().out
    said = {" ".join(without_numbers(line).split()) for line in printed.splitlines()}
    shown = [line for block in blocks if block.language == "text" for line in block.code.splitlines()]
    wanted = {" ".join(without_numbers(line).split()) for line in shown if line not in ("", "...")}
    assert wanted - said == set()
    assert (tmp_path / "predictions.csv").read_text().startswith("row,class,p(class_0)")
    assert any(re.match(r"#% of # samples are right", line) for line in said)
    losses = r"epoch \d: loss ([\d.]+)"
    on_two_ranks = [float(loss) for loss in re.findall(rf"^\[rank 0\] {losses}$", printed, re.MULTILINE)]
    runpy.run_path("loop.py")
    on_one = [float(loss) for loss in re.findall(losses, capfd.readouterr().out)]
    assert len(on_one) == 3
    assert on_one == pytest.approx(on_two_ranks, abs=0.0011), "which are rounded to three digits"
