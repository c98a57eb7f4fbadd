"""The tutorial: a reader who does what it says gets what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.programs import blocks_of, follow


def without_numbers(text: str) -> str:
    return re.sub(r"[\d.,]+(?:e-\d+)?", "#", text)


@pytest.mark.timeout(300)
def test_a_reader_of_the_tutorial_gets_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of("tutorial.md")
    assert sum(block.language == "bash" for block in blocks) >= 6
    follow(blocks, {})
    said = {" ".join(without_numbers(line).split()) for line in capfd.readouterr().out.splitlines()}
    shown = [line for block in blocks if block.language == "text" for line in block.code.splitlines()]
    wanted = {" ".join(without_numbers(line).split()) for line in shown if line not in ("", "...")}
    assert wanted - said == set()
    assert (tmp_path / "predictions.csv").read_text().startswith("row,class,p(class_0)")
    assert any(re.match(r"#% of # samples are right", line) for line in said)
    assert sum("epoch #: loss #" in line for line in said) >= 1
