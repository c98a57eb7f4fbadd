"""The questions and answers: what a program of theirs shall show, it shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.programs import blocks_of, follow
from tests.preloaded import command

PROGRAMS = [block for block in blocks_of("faq.md") if block.language == "python"]


def test_a_rank_that_raises_ends_the_job_and_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follow([block for block in PROGRAMS if block.saved_as], {})
    words = [*command(), "run", "-n", "2", "fails.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: no more" in done.stderr.splitlines()[-1]


def test_all_samples_are_counted_once() -> None:
    (program,) = [block for block in PROGRAMS if not block.saved_as]
    assert "assert result.summary.test.samples == 359" in program.code
    follow([program], {})
